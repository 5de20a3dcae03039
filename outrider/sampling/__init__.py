"""Shared-noise sampling: computes the target's token at a position only from its logits and the noise."""
