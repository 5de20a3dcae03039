"""The picture of one request: bars in lanes."""
