"""What the services share to talk to their engines and to each other."""
