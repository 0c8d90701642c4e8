"""Keys and values of 8 bits in the paged cache."""
