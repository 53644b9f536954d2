"""The same as the Triton kernels in plain torch."""
