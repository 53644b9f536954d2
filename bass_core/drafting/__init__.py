"""Who proposes tokens: a draft model, a draft head, copies of the text, n-grams, and combinations of them."""
