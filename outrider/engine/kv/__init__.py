"""Paged memory of keys and values, and handles on it."""
