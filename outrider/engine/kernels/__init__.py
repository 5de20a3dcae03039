"""Matrix kernels of our own for a few rows at a time, compiled for this processor when they are loaded."""
