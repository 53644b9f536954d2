"""Softmax and draws over whole vocabularies on a CPU."""
