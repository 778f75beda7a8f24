"""A preparation: documents become shards, in tasks that can be repeated."""
