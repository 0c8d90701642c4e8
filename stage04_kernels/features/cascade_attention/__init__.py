"""Cascade attention: what several requests share at their beginning is read once for all of them."""
