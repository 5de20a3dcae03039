"""Candidates below the committed tokens, and the probability that the target chooses them."""
