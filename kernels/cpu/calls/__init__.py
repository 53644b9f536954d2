"""How kernels are compiled, and how threads share a call of one."""
