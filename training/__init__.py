"""What the launcher puts together: configuration, engine, schedule, loop, checkpoints, export."""

import os

import torch

# DeepSpeed looks for an accelerator when it is imported and warns on a machine that has none; this answers first.
if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
