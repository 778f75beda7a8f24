"""Self-attention over packed sequences: one registry of backends, a file for each, and sparse layouts."""
