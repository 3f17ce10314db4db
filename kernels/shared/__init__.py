"""What kernels of several operators use."""
