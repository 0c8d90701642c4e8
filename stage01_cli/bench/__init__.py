"""`stages bench`: measure a running server, the engine, and its start (vllm/benchmarks)."""
