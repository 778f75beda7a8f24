"""Arithmetic over steps, tokens and time. No state, no files, no ranks."""
