"""The data of a run: opened, checked against the model, and streamed."""
