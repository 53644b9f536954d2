"""Kernels written in Triton; each has a reference in torch that computes the same."""
