"""Benches of attention: the backends over many shapes, and prompts that rows share."""
