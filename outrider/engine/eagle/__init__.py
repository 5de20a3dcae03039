"""EAGLE-3 heads: drafts of one layer that read the hidden states of the target's layers."""
