"""From a name to a pair of models: the catalogue, downloads and conversions."""
