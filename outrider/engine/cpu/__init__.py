"""How a forward's products are computed on the CPU: which back end, on which threads, from which layout."""
