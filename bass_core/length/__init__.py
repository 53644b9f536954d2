"""Length policies: how many tokens each row may draft in a round (fixed, Algorithm 1, or by measured cost)."""
