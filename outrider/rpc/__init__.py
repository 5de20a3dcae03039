"""Code that the services share to communicate with their engines and with each other."""
