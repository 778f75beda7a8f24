"""Turns shards into batches: the order of samples, mixtures, the loader."""
