"""The page and its API. Imports only bass_core's public names and handles no tensors."""
