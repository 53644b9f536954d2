"""The machine: memory, transfers, monitoring and one-off set-up time."""
