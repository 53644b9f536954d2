"""Layouts and low-bit forms of weights, and whether a model's weights and modules are those of its class."""
