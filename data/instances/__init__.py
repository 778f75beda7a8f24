"""Sentences become token ids, instances and rows: pure functions of arrays."""
