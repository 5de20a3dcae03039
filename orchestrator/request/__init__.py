"""From a caller's message to a request that may run."""
