"""Connectors: KV-cache blocks that are kept elsewhere too (`--kv-transfer-config`)."""
