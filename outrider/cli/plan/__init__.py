"""`outrider plan`: what a pair needs of a device, from its files alone."""
