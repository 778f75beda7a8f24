"""What makes training on a CPU fast: dropout masks, and the library that computes each matrix product."""
