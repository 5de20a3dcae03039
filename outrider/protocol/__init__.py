"""The messages between the services: plain values, their form on the wire, errors."""
