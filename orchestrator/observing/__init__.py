"""Metrics, traces and timelines of requests, and the number of drafts that they need."""
