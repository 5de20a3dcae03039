"""The OpenAI API over HTTP: a process of its own in front of the orchestrators."""
