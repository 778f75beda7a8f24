"""Benchmarks against peers; each command prints a table and, as its last line, JSON."""
