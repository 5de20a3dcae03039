"""Constraints on the generated text: compiled, cached, and held at every node of a candidate tree."""
