"""C kernels for CPUs, compiled at first use."""
