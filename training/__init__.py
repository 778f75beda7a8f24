"""Training: what the launcher deepspeed_train.py puts together."""
