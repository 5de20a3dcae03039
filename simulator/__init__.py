"""Runs the project's own scheduling, tree and session code on a virtual clock."""
