"""Recorded races: their format, those that ship, and their part of the page."""
