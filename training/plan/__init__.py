"""Arithmetic over steps, tokens and time."""
