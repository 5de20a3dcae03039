"""Weights of 4 or 8 bits: what they stand for, how they are made, and which checkpoints bring them."""
