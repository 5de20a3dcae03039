"""Drafts that are tried without being used: their proposals are compared with the target's tokens."""
