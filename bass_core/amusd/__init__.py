"""AMUSD: a draft model in its own process drafts ahead while the target verifies."""
