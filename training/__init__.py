"""What the launcher puts together: configuration, schedule, optimizer, engine, loop, checkpoints, metrics, export."""
