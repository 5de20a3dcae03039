"""What the services share. Imports no service."""
