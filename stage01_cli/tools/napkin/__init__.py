"""The napkin: how many users a chip serves, and what a token costs, from bytes and operations alone: `stages napkin`."""
