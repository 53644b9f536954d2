"""AMUSD: a draft model in its own thread drafts ahead while the target verifies."""
