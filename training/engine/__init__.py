"""Everything that touches DeepSpeed's engine and its internals."""
