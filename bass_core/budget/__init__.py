"""How many tokens each row may draft in a round: fixed lengths, Algorithm 1, and by measured cost."""
