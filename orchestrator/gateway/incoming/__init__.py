"""From an HTTP request to requests of the client."""
