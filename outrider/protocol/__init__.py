"""The messages between the services: their plain values, their wire format, and errors."""
