"""One attempt at a training: bind, rounds, checkpoints, commit; and simulations in memory."""
