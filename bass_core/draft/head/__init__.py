"""Drafts from a head that reads the target's hidden states.

`head_drafter` in draft/registry.py picks one class for a request: a chain drafted level by level (chain.py), in
one compiled call (compiled.py) or in one CUDA graph (captured.py), trees (trees.py), or one draft at a time for
AMUSD (ahead.py). All read the text and the states through a `HeadFeed` (feed.py).
"""
