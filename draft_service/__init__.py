"""Grows a candidate tree per session with a draft model or by lookup."""
