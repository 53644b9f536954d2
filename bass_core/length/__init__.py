"""How many tokens each row may draft in a round: fixed lengths, Algorithm 1, or by measured cost."""
