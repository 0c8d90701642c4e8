"""`--enable-lora`: adapters, which requests choose by their model's name."""
