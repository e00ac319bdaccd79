"""Did the priced mechanism run? Evidence from inside, where noise and sums are still available."""
