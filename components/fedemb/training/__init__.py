"""Training of one attempt (bind, rounds, checkpoints, commit), and simulations in memory."""
