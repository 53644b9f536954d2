"""Where races run: in this process or on Ray's workers, and which models they load."""
