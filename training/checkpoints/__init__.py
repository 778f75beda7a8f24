"""Checkpoints: written, published, kept, verified, and resumed from."""
