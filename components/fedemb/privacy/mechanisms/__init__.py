"""One module per mechanism: its section, plan and event."""
