"""Verification: which drafts are accepted. Every rule keeps the target's distribution."""
