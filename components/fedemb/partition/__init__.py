"""Partition: validated photos of users, hashed into virtual clients by a Beam pipeline."""
