"""The name of every file and folder of a run's checkpoint folder, `<output_dir>/saved_models/<job_name>`."""

import re
from pathlib import Path

# In a checkpoint, beside the files below: the user's files, unchanged, and all values that were set.
from training.settings.saved_files import DEEPSPEED_JSON as DEEPSPEED_JSON
from training.settings.saved_files import MODEL_JSON as MODEL_JSON
from training.settings.saved_files import RESOLVED as RESOLVED

# In the run's folder.
LATEST = "latest"  # DeepSpeed's pointer to the newest checkpoint
BEST = "best.json"  # our pointer to the checkpoint with the lowest validation loss
SKIPS = "skips.json"  # ranges of samples that training skips
TIME_SPENT = "time_spent.json"  # seconds that the run has used of its --time_budget
CPU_LIBRARIES = "cpu_libraries.json"  # what computes matrix products, for a start before the first checkpoint
UPLOAD_LEASE = ".upload_lease"  # identifies the last process that uploaded checkpoints from this folder
STAGING = ".saving"  # a checkpoint while it is written
DROPPED = ".dropped_"  # prefix of a checkpoint while it is removed
REPLACED = ".replaced_"  # prefix of a valid checkpoint while another of the same step takes its place
DAMAGED = ".damaged"  # suffix of an invalid checkpoint whose step was saved again

# In a checkpoint.
MANIFEST = "manifest.json"
STATE = "bert_pretraining.json"
MODEL_FILE = "mp_rank_00_model_states.pt"
# Stages 1 to 3 have an optimizer file per rank, stage 3 also a model file per rank. In bf16 DeepSpeed adds a prefix.
RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")
FIRST_MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"  # of stage 3, without the prefix

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # what a user may call a checkpoint folder
RUN_TAG = re.compile(r"step_(\d+)")  # what a run calls it; a copy under another name belongs to the user


def tag_of_step(step: int) -> str:
    return f"step_{step:08d}"


def step_of(tag: str) -> int:
    """The step at the end of a tag, or -1."""
    digits = re.search(r"(\d+)$", tag)
    return int(digits.group(1)) if digits else -1


def optimizer_files(checkpoint: Path) -> dict[int, Path]:
    """The optimizer's files of stages 1 to 3, by rank; none at stage 0."""
    matches = (RANK_FILE.fullmatch(path.name) for path in checkpoint.iterdir())
    return {int(match[1]): checkpoint / match[0] for match in matches if match and match[2] == "optim"}
