"""The names under which a checkpoint contains the user's files, unchanged, and the values of all flags and files."""

MODEL_JSON, DEEPSPEED_JSON, RESOLVED = "model.json", "deepspeed.json", "resolved.json"
