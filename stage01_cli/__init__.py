"""Stage 1: the command line (phases 1 and 2 of the walk)."""
