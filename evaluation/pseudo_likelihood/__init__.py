"""Pseudo-log-likelihood of masked models, through stock transformers or packed through ours."""
