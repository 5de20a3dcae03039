"""The OpenAI API over HTTP, as a process of its own before the orchestrators."""
