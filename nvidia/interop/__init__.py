"""Names and shapes of other people's checkpoints, both ways."""
