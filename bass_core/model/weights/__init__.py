"""Layouts and low-bit forms of weights."""
