"""`outrider plan`: what a pair of models needs of a device, computed only from its files."""
