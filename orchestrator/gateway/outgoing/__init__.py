"""Turns the client's events into OpenAI's objects."""
