"""Estimates before a run: memory, time, communication, storage and cost on a cluster (docs/planning.md)."""
