"""Choosing and ranking tokens in one compiled pass over the logits, for rows on the CPU."""
