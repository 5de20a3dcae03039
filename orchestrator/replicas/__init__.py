"""Draft and verify replicas: found, probed, chosen, and the streams to them."""
