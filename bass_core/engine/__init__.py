"""Runs a model: rows, prefill chunks and captured steps."""
