"""Adapters in the front end: which there are, and the one that a request names."""
