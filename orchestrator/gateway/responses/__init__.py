"""`/v1/responses`: OpenAI's newer API for conversations, without anything stored."""
