"""Documents become instances and shards, in tasks that can be repeated."""
