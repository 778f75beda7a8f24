"""What a model is worth: tasks, readers, fine-tuning, minimal pairs, probes and reports."""
