"""Robustness: broken inputs, broken decoders, many users."""
