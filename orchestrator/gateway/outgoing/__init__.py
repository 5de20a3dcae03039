"""From the client's events to OpenAI's objects."""
