"""The scheduler's laboratory: `stages lab`."""
