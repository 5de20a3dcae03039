"""What is counted, traced and drawn of requests, and how many drafts they need."""
