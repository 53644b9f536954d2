"""The page and its API. Contract: imports only bass_core's public names, and handles no tensors."""
