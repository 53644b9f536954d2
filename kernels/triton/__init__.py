"""Triton kernels; each has a torch reference that computes the same."""
