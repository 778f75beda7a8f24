"""Models by stock Auto classes, fine-tuned by the stock Trainer."""
