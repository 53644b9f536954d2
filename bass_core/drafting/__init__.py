"""Who proposes tokens: a model, a head, copies of the text, and combinations of them."""
