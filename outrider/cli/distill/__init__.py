"""`outrider distill`."""
