"""Turns an HTTP request into requests that the client sends."""
