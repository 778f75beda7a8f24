"""Self-attention: the layer, its backends, and sparse layouts."""
