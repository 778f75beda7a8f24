"""Conversion to and from the names and shapes of other checkpoint formats."""
