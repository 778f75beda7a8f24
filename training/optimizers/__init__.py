"""Parameter groups and the optimizers that torch and DeepSpeed do not have."""
