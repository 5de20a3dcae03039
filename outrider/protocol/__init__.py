"""What the services say to each other: plain values, their form on the wire, errors."""
