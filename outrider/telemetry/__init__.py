"""Logs, spans and metrics. All their names are defined here."""
