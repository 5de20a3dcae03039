"""Drafts that are tried without being used: their proposals are compared with what the target says."""
