"""The key-value cache whose rows have their own lengths, and attention over it in transformers' models."""
