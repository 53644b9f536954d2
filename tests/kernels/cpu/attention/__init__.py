"""Attention over tiles, by itself."""
