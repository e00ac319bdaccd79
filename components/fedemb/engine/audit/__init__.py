"""Evidence that the priced mechanism ran."""
