"""Turns documents into instances and shards, in tasks that can be repeated."""
