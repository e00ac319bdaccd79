"""Local training of virtual clients (DP-FedEmb)."""
