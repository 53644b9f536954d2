"""Broken inputs, broken decoders, many users."""
