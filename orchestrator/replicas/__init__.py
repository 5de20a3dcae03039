"""Finds, probes and chooses draft and verify replicas, and runs the streams to them."""
