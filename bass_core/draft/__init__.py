"""Drafters: a draft model, a draft head, copies of the text, and the target itself. Begin with registry.py."""
