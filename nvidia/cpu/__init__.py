"""What makes a CPU fast: dropout masks, and the library of each matrix product."""
