"""Trains a draft on what its target writes."""
