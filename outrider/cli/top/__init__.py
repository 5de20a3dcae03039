"""`outrider top`: what the services do at the moment, from their Prometheus pages."""
