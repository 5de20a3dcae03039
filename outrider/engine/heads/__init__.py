"""Draft heads: drafts of one layer that read hidden states of the target."""
