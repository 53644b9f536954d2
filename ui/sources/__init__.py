"""Runs races, in this process or on Ray workers, and loads their models."""
