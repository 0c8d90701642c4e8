"""What a number format costs in accuracy."""
