"""The outrider command."""
