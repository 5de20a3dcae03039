"""Shared-noise sampling: the target's token at a position, from its logits alone."""
