"""Runs any decoder-only transformers model over paged keys and values."""
