"""Logs, spans and metrics; every name in one place."""
