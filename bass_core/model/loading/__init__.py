"""Load a pair of models by name: the catalogue, downloads and conversions."""
