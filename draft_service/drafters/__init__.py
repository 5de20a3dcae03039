"""Draft kinds behind one interface."""
