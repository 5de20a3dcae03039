"""The OpenAI API and Anthropic's Messages API over HTTP: a process in front of the orchestrators."""
