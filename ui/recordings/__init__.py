"""Recorded races: their file, what else can be played, those that ship, and their part of the page."""
