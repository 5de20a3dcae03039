"""Computes a forward's products on the CPU: back ends, threads and layouts of the weights."""
