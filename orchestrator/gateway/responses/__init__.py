"""`/v1/responses`: OpenAI's newer API for conversations. Nothing is stored."""
