"""Forward passes of target and draft models, and the pair of the two."""
