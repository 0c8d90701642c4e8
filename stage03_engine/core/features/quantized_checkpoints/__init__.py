"""Checkpoints whose matrices are quantized: GPTQ, AWQ, compressed-tensors, fp8."""
