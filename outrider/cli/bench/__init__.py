"""`outrider bench`: how fast an endpoint answers, under a load like that of its users."""
