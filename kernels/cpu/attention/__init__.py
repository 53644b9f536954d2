"""Attention of the compiled forward, over caches whose keys and values lie in tiles."""
