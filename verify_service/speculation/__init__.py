"""What decides about candidates: their price, their worth, how long to wait."""
