"""Layouts and low-bit forms of weights, and checks whether a model still is what its class makes of it."""
