"""Benches of whole runs on the machine at hand."""
