"""A lane of transformers' own `generate`, on the same weights and under the same clock as our decoders."""
