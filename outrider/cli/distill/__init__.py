"""`outrider distill`: trains a draft on what its target writes."""
