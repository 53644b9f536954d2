"""Rounds of `python -m bench simulate` in which trees are drafted, and what they predict."""
