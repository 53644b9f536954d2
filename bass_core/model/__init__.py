"""Forward passes of target and draft models, and the pair that joins the two."""
