"""EAGLE-3 heads: drafts of one layer that read what the target's layers make of a text."""
