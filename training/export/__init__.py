"""Hugging Face folders: written from a checkpoint, and read as first weights."""
