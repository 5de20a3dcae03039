"""Spans and metrics; every name in one place."""
