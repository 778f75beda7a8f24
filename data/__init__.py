"""Text to instances, shards and batches. Knows neither the model nor DeepSpeed."""
