"""Decides about candidates: their price, how probable they are, how long to wait for them."""
