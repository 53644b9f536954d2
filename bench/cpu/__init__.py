"""Benches of whole runs on this machine."""
