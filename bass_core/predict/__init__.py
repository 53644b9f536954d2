"""Costs of rounds on other hardware: datasheets, model shapes, rooflines, and simulated rounds."""
