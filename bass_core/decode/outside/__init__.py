"""Decoding by other code than ours, on the same weights and under the same clock: transformers' own `generate`."""
