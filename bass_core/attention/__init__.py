"""The key-value cache whose rows have their own lengths, and how transformers' models attend over it."""
