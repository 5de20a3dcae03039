"""Turns a caller's message into a request that may run."""
