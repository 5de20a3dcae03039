"""Weights of 4 or 8 bits: what they stand for, how weights are rounded to them, and which checkpoints have
them."""
