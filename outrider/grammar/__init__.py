"""Constraints on the generated text: compiled, cached, and enforced at every node of a candidate tree."""
