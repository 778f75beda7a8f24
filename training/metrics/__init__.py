"""What a run measures, and where the figures go."""
