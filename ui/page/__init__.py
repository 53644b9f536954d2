"""The page: its layout, its settings and their limits."""
