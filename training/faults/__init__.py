"""What a run does about steps that go wrong: bad steps, loss spikes, skipped samples."""
