"""The machine: memory, transfers, graph capture, monitoring and one-off set-up time."""
