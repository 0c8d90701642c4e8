"""`--kv-cache-dtype`: keys and values of 8 bits."""
