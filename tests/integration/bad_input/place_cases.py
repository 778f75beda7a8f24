"""Bad input for the launcher: shards, checkpoints, first weights, the environment, rights and places."""

import json
import socket
from pathlib import Path

import h5py
import numpy as np
from safetensors.torch import load_file, save_file

from data.schema import Rows
from data.writer import write_shard
from tests.integration.bad_input.case import (
    Setup,
    Spoil,
    both,
    cut_short,
    edited,
    immutable,
    link_to_nothing,
    read_only_mount,
    removed,
    replaced,
    table,
    unreadable,
    unwritable,
    vanished_folder,
    variables,
    words,
)
from tests.integration.bad_input.good import WORDS
from tests.integration.bad_input.training_cases import TRAIN
from tests.support import make_rows, write_nvidia_shard
from training.manifest import write_manifest

SHARD = "wiki_training_0.hdf5"
ROWS = 37  # of that shard
NO_DATA = both(removed("data/*"), removed("data"))
RESUMED = words("--output_dir", "{root}/out")
FROM_RUN = ("--load_training_checkpoint", "{root}/out/saved_models/tiny")


def shard_of(num_rows: int, width: int) -> Spoil:
    return lambda setup: write_nvidia_shard(setup.root / "data" / SHARD, make_rows(num_rows, width, 4, seed=0))


def shard_with(name: str, change: np.ndarray | None) -> Spoil:
    """One dataset replaced, or taken out."""

    def spoil(setup: Setup) -> None:
        with h5py.File(setup.root / "data" / SHARD, "r+") as file:
            del file[name]
            if change is not None:
                file[name] = change

    return spoil


def shard_linked_outside(setup: Setup) -> None:
    with h5py.File(setup.root / "data" / SHARD, "r+") as file:
        del file["input_ids"]
        file["input_ids"] = h5py.ExternalLink("/etc/passwd", "/input_ids")


def manifest_of(**changes: object) -> Spoil:
    """A manifest beside the shards that tells something else than they hold."""

    def spoil(setup: Setup) -> None:
        entry = {"name": SHARD, "rows": ROWS, "bytes": (setup.root / "data" / SHARD).stat().st_size, "sha256": "0" * 64}
        replaced("data/manifest.json", json.dumps({"files": [{**entry, **changes}]}))(setup)

    return spoil


def shard_of_tokenizer(split: str) -> Spoil:
    """One more file, which says that another tokenizer made it."""
    return lambda setup: write_shard(
        setup.root / "data" / f"wiki_{split}_8.hdf5",
        Rows(**make_rows(5, 24, 4, seed=0)),
        {"tokenizer_digest": "0" * 64},
    )


def shard_without_masks(split: str) -> Spoil:
    return lambda setup: write_shard(
        setup.root / "data" / f"wiki_{split}_8.hdf5", Rows(**make_rows(5, 24, 4, seed=0)), {"masked": False}
    )


def port_taken(setup: Setup) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    setup.cleanup.callback(listener.close)
    setup.environment.update(_world(MASTER_PORT=str(listener.getsockname()[1])))


def _world(**changes: str) -> dict[str, str]:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return {**world, "MASTER_PORT": "29511", **changes}


def world(**changes: str) -> Spoil:
    return variables(**_world(**changes))


def largest_file_cut_short(folder: str) -> Spoil:
    def spoil(setup: Setup) -> None:
        largest = max((path for path in (setup.root / folder).rglob("*") if path.is_file()), key=_size)
        cut_short(largest.relative_to(setup.root).as_posix())(setup)

    return spoil


def _size(path: Path) -> int:
    return path.stat().st_size


def narrow_weights(setup: Setup) -> None:
    """Every matrix with a column less than config.json says."""
    path = setup.root / "hf" / "model.safetensors"
    save_file({name: tensor[..., 1:].contiguous() for name, tensor in load_file(path).items()}, path)


def state_of(text: str) -> Spoil:
    """The newest checkpoint with another state, and with a manifest that agrees."""

    def spoil(setup: Setup) -> None:
        folder = setup.root / "out" / "saved_models" / "tiny" / "step_00000002"
        (folder / "bert_pretraining.json").write_text(text)
        (folder / "manifest.json").unlink()
        write_manifest(folder)
        RESUMED(setup)

    return spoil


def state_with(**changes: object) -> Spoil:
    def spoil(setup: Setup) -> None:
        path = setup.root / "out" / "saved_models" / "tiny" / "step_00000002" / "bert_pretraining.json"
        state_of(json.dumps({**json.loads(path.read_text()), **changes}))(setup)

    return spoil


def _other_words() -> str:
    """As many tokens as the good setup's tokenizer has, in another order."""
    return "".join(f"{token}\n" for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *reversed(WORDS)))


OTHER_TOKENIZER = both(replaced("v.txt", _other_words()), edited("model.json", "bert_token_file", "v.txt"))
SHARDS = {
    "no folder": (NO_DATA, "data", "no such folder", "data.prepare"),
    "an empty folder": (removed("data/*"), "data", "no HDF5 file", "data.prepare"),
    "a file for a folder": (both(NO_DATA, replaced("data", "x")), "data", "no such folder", "data.prepare"),
    "a link to nothing": (both(NO_DATA, link_to_nothing("data")), "data", "no such folder", "data.prepare"),
    "only validation files": (removed("data/*training*"), "data", "none with 'training'", "data.prepare"),
    "no HDF5": (replaced(f"data/{SHARD}", "text"), SHARD, "is no HDF5 file", "remove it"),
    "an empty file": (replaced(f"data/{SHARD}", ""), SHARD, "(0 bytes)", "remove it"),
    "cut short": (cut_short(f"data/{SHARD}"), SHARD, "damaged or incomplete", "copy it again"),
    "another width": (shard_of(5, 16), SHARD, "16 tokens wide", "pass --max_seq_length 16"),
    "a dataset missing": (shard_with("segment_ids", None), SHARD, "no dataset 'segment_ids'", "prepare it anew"),
    "floats": (shard_with("input_ids", np.zeros((ROWS, 24), np.float32)), SHARD, "float32", "not integers"),
    "other rows": (shard_with("input_mask", np.ones((4, 24), np.int8)), SHARD, "(4, 24)", "expected (37, 24)"),
    "ids beyond the vocabulary": (
        shard_with("input_ids", np.full((ROWS, 24), 1000, np.int32)), SHARD, "found 1000", "outside 0…60"
    ),
    "a link to another file": (shard_linked_outside, SHARD, "ExternalLink", "refused"),
    "a broken link among them": (link_to_nothing("data/wiki_training_9.hdf5"), "wiki_training_9", "no such file", "check"),
    "a folder among them": (replaced("data/wiki_training_9.hdf5/x", ""), "wiki_training_9.hdf5", "no such file", "check"),
    "a manifest of another size": (manifest_of(bytes=1), SHARD, "the manifest says 1", "copy it again"),
    "a manifest of other rows": (manifest_of(rows=7), SHARD, "the manifest says 7", "copy it again"),
    "a manifest of another file": (manifest_of(name="a_training.hdf5"), "a_training.hdf5", "is missing", "copy it again"),
    "a file that the manifest has not": (manifest_of(name="a_training.hdf5"), SHARD, "not listed", "folder of its own"),
    "another tokenizer": (shard_of_tokenizer("training"), "data", "another tokenizer", "prepare the data again"),
    "another tokenizer for validation": (
        shard_of_tokenizer("validation"), "data", "another tokenizer", "prepare the data again"
    ),
    "no masks": (shard_without_masks("training"), "wiki_training_8.hdf5", "without masks", "pass --dynamic_masking"),
    "no masks for validation": (
        both(shard_without_masks("validation"), words("--dynamic_masking")), "wiki_validation_8.hdf5", "without masks", "--dupe_factor 1"
    ),
    "a manifest of other content": (
        both(manifest_of(), words("--verify_data")), SHARD, "not what the manifest's sha256 says", "copy it again"
    ),
    "a manifest of words": (manifest_of(bytes="many"), "manifest.json", "no manifest of shards", "prepare it anew"),
    "a manifest that is no JSON": (replaced("data/manifest.json", "{"), "manifest.json", "no manifest", "prepare it anew"),
    "a manifest that is no text": (replaced("data/manifest.json", b"\xff"), "manifest.json", "no manifest", "prepare it"),
}  # fmt: skip

CHECKPOINTS = {
    "no folder": (words("--load_cp", "{root}/lost"), "lost", "no such folder", "saved_models/<job_name>"),
    "a folder without any": (words("--load_cp", "{root}/data"), "data", "no complete checkpoint", "saved_models/<job_name>"),
    "no such id": (words(*FROM_RUN, "--load_cp_id", "step_9"), "'step_9'", "found: step_", "--load_checkpoint_id"),
    "an id that leaves the folder": (words(*FROM_RUN, "--load_cp_id", "../tiny"), "'../tiny'", "found: step_", "--load_check"),
    "the named one damaged": (
        both(largest_file_cut_short("out/saved_models/tiny/step_00000001"), words(*FROM_RUN, "--load_cp_id", "step_00000001")),
        "step_00000001", "bytes", "choose another",
    ),
    "another model": (
        both(RESUMED, edited("model.json", "bert_model_config.hidden_size", 64)),
        "step_00000002", "hidden_size: 32 there, 64 now", "another --job_name",
    ),
    "the other layout": (both(RESUMED, words("--no-preln")), "step_00000002", "preln: True there, False now", "--job_name"),
    "another ZeRO stage": (
        both(RESUMED, edited("deepspeed.json", "zero_optimization.stage", 2)), "step_00000002", "stage 2", "the same DeepSpeed JSON"
    ),
    "another seed": (both(RESUMED, words("--seed", "7")), "step_00000002", "was begun with --seed 42", "pass --seed 42"),
    "another optimizer": (
        both(RESUMED, edited("deepspeed.json", "optimizer.type", "Muon")), "step_00000002", "the optimizer adamw", "the same optimizer.type"
    ),
    "other data": (
        both(RESUMED, removed(f"data/{SHARD}")), "step_00000002", "64 rows in 3 files (digest", "restore that data"
    ),
    "another tokenizer": (
        both(RESUMED, OTHER_TOKENIZER), "step_00000002", "another tokenizer than the model JSON's bert_token_file: digest", "restore that file"
    ),
    "another run's tokenizer": (
        both(words(*FROM_RUN), OTHER_TOKENIZER), "step_00000002", "another tokenizer", "restore that file"
    ),
    "another run's, past the end of the schedule": (
        both(words(*FROM_RUN), edited("model.json", "mixed_seq_training.24.total_training_steps", 2)),
        "step_00000002", "total_training_steps is 2", "pass --rewarmup",
    ),
    "a state of words": (
        state_with(step="many"), "bert_pretraining.json", "step: found 'many'", "use another checkpoint"
    ),
    "a state beyond numbers": (
        state_with(samples=2**70), "bert_pretraining.json", f"samples: found {2**70}", "use another checkpoint"
    ),
    "a state with half a range": (
        state_with(skips=[[1]]), "bert_pretraining.json", "skips: found [1]", "use another checkpoint"
    ),
    "a state that is no JSON": (
        state_of("{"), "bert_pretraining.json", "no valid JSON", "mend it"
    ),
    "a state of another version": (
        state_with(seeds=1), "bert_pretraining.json", "another version", "use that one"
    ),
    "skips that are none": (
        both(RESUMED, replaced("out/saved_models/tiny/skips.json", "[[9, 3]]")), "skips.json", "[9, 3]", "remove it to leave out only what"
    ),
}  # fmt: skip

FIRST_WEIGHTS = {
    "no folder": (words("--use_pretrain", "{root}/lost"), "--use_pretrain", "no folder here", "model.safetensors"),
    "none named": (words("--use_pretrain"), "--use_pretrain", "model.json", "give a folder"),
    "no weights in it": (words("--use_pretrain", "{root}/tokenizer"), "model.safetensors", "cannot be read", "export_hf"),
    "weights cut short": (
        both(cut_short("hf/model.safetensors"), words("--use_pretrain", "{root}/hf")), "model.safetensors", "cannot be read", "copy"
    ),
    "no config": (both(removed("hf/config.json"), words("--use_pretrain", "{root}/hf")), "config.json", "cannot be read", "export_hf"),
    "a config that is a list": (
        both(replaced("hf/config.json", "[]"), words("--use_pretrain", "{root}/hf")), "config.json", "list", "export_hf"
    ),
    "another kind of model": (
        both(edited("hf/config.json", "model_type", "gpt2"), words("--use_pretrain", "{root}/hf")), "config.json", "'gpt2'", "expected 'bert'"
    ),
    "a config of words": (
        both(edited("hf/config.json", "max_position_embeddings", "many"), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "config.json do not fit", "export_hf",
    ),
    "a config with a list for a word": (
        both(edited("hf/config.json", "hidden_act", []), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "config.json do not fit", "export_hf",
    ),
    "a pre-LN checkpoint whose head computes something else": (
        both(edited("hf/config.json", "hidden_act", "relu"), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "hidden_act is 'relu'", "hidden_act 'gelu'",
    ),
    "a pre-LN checkpoint without a padding token": (
        both(edited("hf/config.json", "pad_token_id", None), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "pad_token_id is null", "id of the padding token",
    ),
    "weights of another shape": (
        both(narrow_weights, words("--use_pretrain", "{root}/hf")), "--use_pretrain {root}/hf", "has 60 rows", "must be equal"
    ),
    "another size": (
        both(edited("model.json", "bert_model_config.intermediate_size", 40), words("--use_pretrain", "{root}/hf")),
        "intermediate_size is 48", "model JSON says 40", "make them equal",
    ),
    "masks anew without a tokenizer": (
        both(edited("model.json", "bert_token_file", None), words("--dynamic_masking")), "--dynamic_masking", "needs the tokenizer", "bert_token_file"
    ),
}  # fmt: skip

ENVIRONMENT = {
    "a world without ranks": (variables(WORLD_SIZE="2"), "RANK", "not set", "torchrun"),
    "a rank without a world": (variables(RANK="0"), "WORLD_SIZE", "not set", "unset"),
    "a rank that is a word": (world(RANK="first"), "RANK", "found 'first'", "whole number"),
    "a world of none": (world(WORLD_SIZE="0"), "WORLD_SIZE", "found '0'", "from 1 up"),
    "a rank beyond the world": (world(RANK="2", WORLD_SIZE="2"), "RANK", "found 2", "0 to 1"),
    "a local rank beyond the machine": (world(LOCAL_RANK="4"), "LOCAL_RANK", "found 4", "expected 0 to 0"),
    "more ranks here than anywhere": (world(LOCAL_SIZE="8"), "LOCAL_SIZE", "found 8", "torchrun"),
    "restarts below a launcher": (
        both(world(), words("--max_restarts", "3")), "--max_restarts 3", "a launcher started this rank", "scripts/supervise.py"
    ),
    "a port that is a word": (world(MASTER_PORT="http"), "MASTER_PORT", "found 'http'", "1 to 65535"),
    "a port beyond ports": (world(MASTER_PORT="70000"), "MASTER_PORT", "found '70000'", "1 to 65535"),
    "a port that is taken": (port_taken, "MASTER_PORT", "in use", "another"),
    "no place to meet": (
        variables(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2"), "MASTER_ADDR", "not set", "torchrun"
    ),
    "srun without a place to meet": (
        variables(SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_NTASKS_PER_NODE="4"),
        "MASTER_ADDR", "not set", "scripts/slurm.sh",
    ),
    "srun without tasks a node": (
        variables(SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_NTASKS="4", MASTER_ADDR="node"),
        "SLURM_NTASKS_PER_NODE", "not set", "--ntasks-per-node",
    ),
    "threads as a word": (variables(OMP_NUM_THREADS="all"), "OMP_NUM_THREADS", "found 'all'", "unset it"),
    "no threads": (variables(OMP_NUM_THREADS="0"), "OMP_NUM_THREADS", "found '0'", "unset it"),
}  # fmt: skip

PLACES = {
    "the output is a file": (words("--output_dir", "{root}/model.json"), "--output_dir", "is a file", "expected a folder"),
    "the output is below a file": (words("--output_dir", "{root}/model.json/a/b"), "--output_dir", "is a file", "another"),
    "the output is a link to nothing": (
        both(link_to_nothing("link"), words("--output_dir", "{root}/link")), "--output_dir", "link to nothing", "another"
    ),
    "a current folder that has vanished": (
        both(vanished_folder, words("--output_dir", "out")), "--output_dir", "current folder has vanished", "change to one"
    ),
    "the output cannot be written": (
        both(unwritable("mine"), words("--output_dir", "{root}/mine")), "--output_dir", "cannot be written", "another"
    ),
    "the output is immutable": (
        both(immutable("mine"), words("--output_dir", "{root}/mine/deeper")), "--output_dir", "cannot be written", "another"
    ),
    "the output is mounted read-only": (
        both(read_only_mount("mine"), words("--output_dir", "{root}/mine")), "--output_dir", "cannot be written", "another"
    ),
    "a job folder that is a file": (
        replaced("new/saved_models/tiny", "x"), "saved_models/tiny", "is a file", "another"
    ),
    "a log folder that is a file": (
        replaced("new/runs", "x"), "new/runs", "is a file", "another"
    ),
    "a model JSON that may not be read": (unreadable("model.json"), "model.json", "Permission denied", "right"),
    "a shard that may not be read": (unreadable(f"data/{SHARD}"), SHARD, "Permission denied", "right"),
    "a data folder that may not be read": (unreadable("data"), "data", "Permission denied", "right"),
    "a tokenizer that may not be read": (unreadable("tokenizer/tokenizer.json"), "tokenizer.json", "Permission denied", "right"),
    "weights that may not be read": (
        both(unreadable("hf/model.safetensors"), words("--use_pretrain", "{root}/hf")), "model.safetensors", "ermission denied", "right"
    ),
}  # fmt: skip

CASES = [*table(TRAIN, {f"{kind}, {name}": row for kind, rows in (
    ("shards", SHARDS), ("checkpoints", CHECKPOINTS), ("first weights", FIRST_WEIGHTS), ("environment", ENVIRONMENT),
    ("places", PLACES),
) for name, row in rows.items()})]  # fmt: skip
