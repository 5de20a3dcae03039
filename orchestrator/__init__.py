"""Request in, token stream out."""
