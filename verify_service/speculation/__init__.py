"""Decides about candidates: their price, their probability, and how long to wait for them."""
