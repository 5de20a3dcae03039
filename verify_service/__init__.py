"""Runs the target: verifies candidates and commits tokens."""
