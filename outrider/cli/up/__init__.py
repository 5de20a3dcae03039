"""`outrider up`: the services on this machine, each its own process."""
