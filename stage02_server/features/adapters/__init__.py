"""Adapters over HTTP: what /v1/models and /metrics say of them, and loading them while the server runs."""
