"""`--kv-transfer-config`: KV-cache blocks that outlive the engine, in a folder."""
