"""The package that all services share. It imports no service."""

__version__ = "0.1.0"
