"""Keeps a share of the served tokens in files, for drafts to learn from. Off unless a folder is named."""
