"""Shards become batches: the order of samples, mixtures, the loader."""
