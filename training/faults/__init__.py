"""What a run does when a step goes wrong: bad steps, loss spikes and rollbacks, skipped samples, unreadable data."""
