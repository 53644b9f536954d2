"""References of the Triton kernels in plain torch."""
