"""AMUSD: a draft model in a process of its own drafts ahead while the target verifies."""
