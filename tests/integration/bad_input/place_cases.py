"""Bad input for the launcher: shards, checkpoints, initial weights, the environment, permissions and folders."""

import json
import socket
from pathlib import Path

import h5py
import numpy as np
from safetensors.torch import load_file, save_file

from data.shards.schema import Rows
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
    without,
    words,
)
from tests.integration.bad_input.good import WORDS
from tests.integration.bad_input.training_cases import TRAIN
from tests.support import make_rows, write_nvidia_shard
from tests.unit.data.shards_on_disk import write_shard
from training.checkpoints.manifest import write_manifest
from training.runtime.lock import lock_folder

SHARD = "wiki_training_0.hdf5"
ROWS = 37  # of that shard
NO_DATA = both(removed("data/*"), removed("data"))
RESUMED = words("--output_dir", "{root}/out")
FROM_RUN = ("--load_training_checkpoint", "{root}/out/saved_models/tiny")


def held_by_another(setup: Setup) -> None:
    """Another run is using the folder."""
    setup.cleanup.enter_context(lock_folder(setup.root / "out" / "saved_models" / "tiny"))


def shard_of(num_rows: int, width: int) -> Spoil:
    return lambda setup: write_nvidia_shard(setup.root / "data" / SHARD, make_rows(num_rows, width, 4, seed=0))


def shard_with(name: str, change: np.ndarray | None) -> Spoil:
    """One dataset replaced or removed."""

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
    """A manifest that does not match its shards."""

    def spoil(setup: Setup) -> None:
        entry = {"name": SHARD, "rows": ROWS, "bytes": (setup.root / "data" / SHARD).stat().st_size, "sha256": "0" * 64}
        replaced("data/manifest.json", json.dumps({"files": [{**entry, **changes}]}))(setup)

    return spoil


def shard_of_tokenizer(split: str) -> Spoil:
    """One more shard, prepared with another tokenizer."""
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
    port = str(listener.getsockname()[1])
    setup.environment.update(_world(MASTER_PORT=port, WORLD_SIZE="2", LOCAL_SIZE="2"))  # a single rank takes another


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
    """Every matrix with one column less than config.json says."""
    path = setup.root / "hf" / "model.safetensors"
    save_file({name: tensor[..., 1:].contiguous() for name, tensor in load_file(path).items()}, path)


def state_of(text: str) -> Spoil:
    """The newest checkpoint with another state and a matching manifest."""

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
    """The tokens of the good setup's tokenizer in another order."""
    return "".join(f"{token}\n" for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *reversed(WORDS)))


OTHER_TOKENIZER = both(replaced("v.txt", _other_words()), edited("model.json", "bert_token_file", "v.txt"))
SHARDS = {
    "no folder": (NO_DATA, "data", "no such folder", "expected one with shards", "data.prepare"),
    "an empty folder": (removed("data/*"), "data", "no HDF5 file", "with 'training' in its name", "data.prepare"),
    "a file for a folder": (both(NO_DATA, replaced("data", "x")), "data", "no such folder", "expected one with shards", "data.prepare"),
    "a link to nothing": (both(NO_DATA, link_to_nothing("data")), "data", "no such folder", "expected one with shards", "data.prepare"),
    "only validation files": (removed("data/*training*"), "data", "none with 'training'", "with 'training' in its name", "data.prepare"),
    "no HDF5": (replaced(f"data/{SHARD}", "text"), SHARD, "is not an HDF5 file", "expected a shard as described in docs/data_format.md", "Remove it"),
    "an empty file": (replaced(f"data/{SHARD}", ""), SHARD, "found 0 bytes", "expected a shard as described in docs/data_format.md", "Remove it"),
    "cut short": (cut_short(f"data/{SHARD}"), SHARD, "damaged or incomplete", "expected a complete HDF5 file", "copy it again"),
    "another width": (shard_of(5, 16), SHARD, "16 tokens wide", "but --max_seq_length is 24", "pass --max_seq_length 16"),
    "a dataset missing": (shard_with("segment_ids", None), SHARD, "no dataset 'segment_ids'", "expected input_ids, input_mask, segment_ids", "Prepare it again"),
    "floats": (shard_with("input_ids", np.zeros((ROWS, 24), np.float32)), SHARD, "float32", "expected integers", "Prepare it again"),
    "other rows": (shard_with("input_mask", np.ones((4, 24), np.int8)), SHARD, "(4, 24)", "expected int8 (37, 24)", "Prepare it again"),
    "ids beyond the vocabulary": (
        shard_with("input_ids", np.full((ROWS, 24), 1000, np.int32)), SHARD, "found 1000", "outside 0…60", "expected the tokenizer that made the shard"
    ),
    "a link to another file": (shard_linked_outside, SHARD, "ExternalLink", "expected a dataset in the file itself", "refused"),
    "a broken link among them": (link_to_nothing("data/wiki_training_9.hdf5"), "wiki_training_9", "no such file", "expected a shard", "Check"),
    "a folder among them": (replaced("data/wiki_training_9.hdf5/x", ""), "wiki_training_9.hdf5", "no such file", "expected a shard", "Check"),
    "a manifest of another size": (manifest_of(bytes=1), SHARD, "differs from the manifest's", "expected 1)", "copy it again"),
    "a manifest of other rows": (manifest_of(rows=7), SHARD, "found 37", "expected 7", "copy it again"),
    "a manifest of another file": (manifest_of(name="a_training.hdf5"), "a_training.hdf5", "is missing", "manifest.json lists it", "copy it again"),
    "a file that the manifest has not": (manifest_of(name="a_training.hdf5"), SHARD, "not listed", "listed in the manifest.json beside it", "another folder"),
    "another tokenizer": (shard_of_tokenizer("training"), "data", "another tokenizer", "the tokenizer that prepared the data", "prepare the data again"),
    "another tokenizer for validation": (
        shard_of_tokenizer("validation"), "data", "another tokenizer", "the tokenizer that prepared the data", "prepare the data again"
    ),
    "no masks": (shard_without_masks("training"), "wiki_training_8.hdf5", "without masks", "--dupe_factor 1 or more", "pass --dynamic_masking"),
    "no masks for validation": (
        both(shard_without_masks("validation"), words("--dynamic_masking")), "wiki_validation_8.hdf5", "without masks", "--dupe_factor 1 or more", "set the model JSON's validation.path to another folder"
    ),
    "a manifest of other content": (
        both(manifest_of(), words("--verify_data")), SHARD, "its content does not match", "the manifest's sha256", "copy it again"
    ),
    "a manifest of words": (manifest_of(bytes="many"), "manifest.json", "is not a manifest of shards", "expected one that `python -m data.prepare` wrote", "Prepare it again"),
    "a manifest that is no JSON": (replaced("data/manifest.json", "{"), "manifest.json", "is not a manifest", "expected one that `python -m data.prepare` wrote", "Prepare it again"),
    "a manifest that is no text": (replaced("data/manifest.json", b"\xff"), "manifest.json", "is not a manifest", "expected one that `python -m data.prepare` wrote", "Prepare it"),
}  # fmt: skip

CHECKPOINTS = {
    "no folder": (words("--load_cp", "{root}/lost"), "lost", "no such folder", "a run's <output_dir>/saved_models/<job_name>", "Pass a run's"),
    "a folder without any": (words("--load_cp", "{root}/data"), "data", "no complete checkpoint", "a run's <output_dir>/saved_models/<job_name>", "Pass a run's"),
    "a checkpoint itself": (words("--load_cp", "{root}/out/saved_models/tiny/step_00000001"), "step_00000001", "no complete checkpoint", "It is a checkpoint itself", "and --load_checkpoint_id step_00000001"),
    "an export": (words("--load_cp", "{root}/hf"), "hf", "no complete checkpoint", "It is a Hugging Face folder", "--use_pretrain"),
    "no such id": (words(*FROM_RUN, "--load_cp_id", "step_9"), "'step_9'", "found: step_", "step_00000001, step_00000002", "--load_checkpoint_id"),
    "an id that leaves the folder": (words(*FROM_RUN, "--load_cp_id", "../tiny"), "'../tiny'", "found: step_", "step_00000001, step_00000002", "--load_check"),
    "the named one damaged": (
        both(largest_file_cut_short("out/saved_models/tiny/step_00000001"), words(*FROM_RUN, "--load_cp_id", "step_00000001")),
        "step_00000001", "bytes", "but manifest.json lists", "Choose another",
    ),
    "another model": (
        both(RESUMED, edited("model.json", "bert_model_config.hidden_size", 64)),
        "step_00000002", "hidden_size: 32 there, 64 now", "hidden_size: 32 there", "another --job_name",
    ),
    "the other layout": (both(RESUMED, words("--no-preln")), "step_00000002", "preln: True there, False now", "preln: True there", "--job_name"),
    "another ZeRO stage": (
        both(RESUMED, edited("deepspeed.json", "zero_optimization.stage", 2)), "step_00000002", "stage 2", "was saved with ZeRO stage 0 in fp32", "the same DeepSpeed JSON"
    ),
    "another seed": (both(RESUMED, words("--seed", "7")), "step_00000002", "was started with --seed 42", "was started with --seed", "Pass --seed 42"),
    "another optimizer": (
        both(RESUMED, edited("deepspeed.json", "optimizer.type", "Muon")), "step_00000002", "the optimizer adamw", "was saved with the optimizer adamw", "the same optimizer.type"
    ),
    "other data": (
        both(RESUMED, removed(f"data/{SHARD}")), "step_00000002", "64 rows in 3 files (digest", "64 rows in 3 files", "Restore that data"
    ),
    "another tokenizer": (
        both(RESUMED, OTHER_TOKENIZER), "step_00000002", "a different tokenizer than the model JSON's bert_token_file: digest", "than the model JSON's bert_token_file: digest", "Restore that file"
    ),
    "another run's tokenizer": (
        both(words(*FROM_RUN), OTHER_TOKENIZER), "step_00000002", "a different tokenizer", "than the model JSON's bert_token_file: digest", "Restore that file"
    ),
    "another run's, past the end of the schedule": (
        both(words(*FROM_RUN), edited("model.json", "mixed_seq_training.24.total_training_steps", 2)),
        "step_00000002", "total_training_steps is 2", "but the model JSON's total_training_steps is 2, so no step is left", "Pass --rewarmup",
    ),
    "a state of words": (
        state_with(step="many"), "bert_pretraining.json", "step: found 'many'", "expected a whole number", "Use another checkpoint"
    ),
    "a state beyond numbers": (
        state_with(samples=2**70), "bert_pretraining.json", f"samples: found {2**70}", "expected 0 to 2^63 - 1", "Use another checkpoint"
    ),
    "a state with half a range": (
        state_with(skips=[[1]]), "bert_pretraining.json", "skips: found [1]", "expected [first, end] with 0 <= first < end", "Use another checkpoint"
    ),
    "a state that is no JSON": (
        state_of("{"), "bert_pretraining.json", "not valid JSON", "expected the state of a run, one JSON object", "fix it"
    ),
    "a state of another version": (
        state_with(seeds=1), "bert_pretraining.json", "another version", "expected the keys of this version", "Use the version that wrote it"
    ),
    "skips that are none": (
        both(RESUMED, replaced("out/saved_models/tiny/skips.json", "[[9, 3]]")), "skips.json", "[9, 3]", "expected [first, end] with 0 <= first < end)", "remove it to skip only the samples"
    ),
}  # fmt: skip

FIRST_WEIGHTS = {
    "no folder": (words("--use_pretrain", "{root}/lost"), "--use_pretrain", "is not a folder", "expected a Hugging Face folder with model.safetensors", "download it first"),
    "other tokens at its ids": (
        both(removed("hf/tokenizer.json"), replaced("hf/vocab.txt", _other_words()), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "shared ids (id ", "expected the same", "start without --use_pretrain",
    ),
    "none named": (words("--use_pretrain"), "--use_pretrain", "no folder is given", "expected a folder with a model in Hugging Face's layout", "set bert_model_file"),
    "no weights in it": (both(removed("hf/model.safetensors"), words("--use_pretrain", "{root}/hf")), "model.safetensors", "o such file", "expected a model in Hugging Face's layout", "export_hf"),
    "weights cut short": (
        both(cut_short("hf/model.safetensors"), words("--use_pretrain", "{root}/hf")), "model.safetensors", "cannot be read", "expected a model in Hugging Face's layout", "Copy"
    ),
    "an index of weights elsewhere": (
        both(removed("hf/model.safetensors"), replaced("hf/model.safetensors.index.json", '{"weight_map": {"a": "../a"}}'), words("--use_pretrain", "{root}/hf")),
        "model.safetensors.index.json", "names '../a'", "expected names of files beside it", "Copy the folder again",
    ),
    "no config": (both(removed("hf/config.json"), words("--use_pretrain", "{root}/hf")), "config.json", "cannot be read", "expected a model in Hugging Face's layout", "export_hf"),
    "a config that is a list": (
        both(replaced("hf/config.json", "[]"), words("--use_pretrain", "{root}/hf")), "config.json", "list", "expected a model in Hugging Face's layout", "export_hf"
    ),
    "another kind of model": (
        both(edited("hf/config.json", "model_type", "gpt2"), words("--use_pretrain", "{root}/hf")), "config.json", "'gpt2'", "expected one of bert, roberta, xlm-roberta, camembert (post-LN)", "give a checkpoint of one of these"
    ),
    "a config of words": (
        both(edited("hf/config.json", "max_position_embeddings", "many"), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "config.json cannot be understood", "expected a model in Hugging Face's layout", "export_hf",
    ),
    "a config with a list for a word": (
        both(edited("hf/config.json", "hidden_act", []), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "config.json cannot be understood", "expected a model in Hugging Face's layout", "export_hf",
    ),
    "a pre-LN checkpoint whose head computes something else": (
        both(edited("hf/config.json", "hidden_act", "relu"), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "hidden_act is 'relu'", "always computes gelu", "hidden_act 'gelu'",
    ),
    "a pre-LN checkpoint without a padding token": (
        both(edited("hf/config.json", "pad_token_id", None), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "pad_token_id is null", "numbered from pad_token_id + 1", "id of the padding token",
    ),
    "weights of another shape": (
        both(narrow_weights, words("--use_pretrain", "{root}/hf")), "--use_pretrain {root}/hf", "has 60 rows", "vocab_size is 61", "must be equal"
    ),
    "another size": (
        both(edited("model.json", "bert_model_config.intermediate_size", 40), words("--use_pretrain", "{root}/hf")),
        "intermediate_size is 48", "model JSON says 40", "but the model JSON says 40", "make them equal",
    ),
    "absolute positions for a rotary model": (
        both(edited("model.json", "bert_model_config.position_embedding_type", "rotary"), words("--use_pretrain", "{root}/hf")),
        "--use_pretrain {root}/hf", "position_embedding_type is 'absolute'", "but the model JSON says 'rotary'", "make them equal",
    ),
    "no model in either file": (without("model.json", "bert_model_config"), "model JSON", "no bert_model_config", "describe the model there", "pass --use_pretrain"),
    "new masks without a tokenizer": (
        both(edited("model.json", "bert_token_file", None), words("--dynamic_masking")), "--dynamic_masking", "needs the tokenizer", "needs the tokenizer's special tokens", "bert_token_file"
    ),
}  # fmt: skip

ENVIRONMENT = {
    "a world without ranks": (variables(WORLD_SIZE="2"), "RANK", "not set", "expected a whole number from 0 up", "torchrun"),
    "a rank without a world": (variables(RANK="0"), "WORLD_SIZE", "not set", "expected a whole number from 1 up", "unset"),
    "a rank that is a word": (world(RANK="first"), "RANK", "found 'first'", "expected a whole number from 0 up", "unset RANK"),
    "a world of none": (world(WORLD_SIZE="0"), "WORLD_SIZE", "found '0'", "expected a whole number from 1 up", "unset RANK"),
    "a rank beyond the world": (world(RANK="2", WORLD_SIZE="2"), "RANK", "found 2", "expected 0 to 1", "unset RANK"),
    "a local rank beyond the machine": (world(LOCAL_RANK="4"), "LOCAL_RANK", "found 4", "expected 0 to 0", "unset RANK"),
    "more ranks here than anywhere": (world(LOCAL_SIZE="8"), "LOCAL_SIZE", "found 8", "but WORLD_SIZE is 1", "torchrun"),
    "restarts by the launcher itself": (
        words("--max_restarts", "3"), "--max_restarts", "does not restart itself", "torchrun --standalone --nproc_per_node N --max-restarts R", "start it with `torchrun"
    ),
    "a port that is a word": (world(MASTER_PORT="http"), "MASTER_PORT", "found 'http'", "expected a port from 1 to 65535", "Set it to a free one"),
    "a port beyond ports": (world(MASTER_PORT="70000"), "MASTER_PORT", "found '70000'", "expected a port from 1 to 65535", "Set it to a free one"),
    "a port that is taken": (port_taken, "MASTER_PORT", "in use", "free port", "another"),
    "no place to meet": (
        variables(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2"), "MASTER_ADDR", "not set", "expected the machine of rank 0", "torchrun"
    ),
    "srun without a place to meet": (
        variables(SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_NTASKS_PER_NODE="4"),
        "MASTER_ADDR", "not set", "export MASTER_ADDR (the first node's name)", "scripts/slurm.sh",
    ),
    "srun without tasks a node": (
        variables(SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_NTASKS="4", MASTER_ADDR="node"),
        "SLURM_NTASKS_PER_NODE", "not set", "or pass srun --ntasks-per-node", "Start it with scripts/slurm.sh",
    ),
    "threads as a word": (variables(OMP_NUM_THREADS="all"), "OMP_NUM_THREADS", "found 'all'", "expected a whole number of at least 1", "Unset it"),
    "no threads": (variables(OMP_NUM_THREADS="0"), "OMP_NUM_THREADS", "found '0'", "expected a whole number of at least 1", "Unset it"),
}  # fmt: skip

PLACES = {
    "two runs in one output folder": (
        both(held_by_another, RESUMED), "out/saved_models/tiny", "another run is writing there (process", "expected a folder that no other run uses", "pass another --job_name"
    ),
    "the output is a file": (words("--output_dir", "{root}/model.json"), "--output_dir", "is a file", "expected a folder", "Remove it, or pass another"),
    "the output is below a file": (words("--output_dir", "{root}/model.json/a/b"), "--output_dir", "is a file", "expected a folder", "another"),
    "the output is a link to nothing": (
        both(link_to_nothing("link"), words("--output_dir", "{root}/link")), "--output_dir", "a broken link", "expected a folder", "another"
    ),
    "a current folder that has vanished": (
        both(vanished_folder, words("--output_dir", "out")), "--output_dir", "current folder no longer exists", "expected one that exists", "Change to another"
    ),
    "the output cannot be written": (
        both(unwritable("mine"), words("--output_dir", "{root}/mine")), "--output_dir", "cannot be written", "expected a folder that this user can write to", "another"
    ),
    "the output is immutable": (
        both(immutable("mine"), words("--output_dir", "{root}/mine/deeper")), "--output_dir", "cannot be written", "expected a folder that this user can write to", "another"
    ),
    "the output is mounted read-only": (
        both(read_only_mount("mine"), words("--output_dir", "{root}/mine")), "--output_dir", "cannot be written", "expected a folder that this user can write to", "another"
    ),
    "a job folder that is a file": (
        replaced("new/saved_models/tiny", "x"), "saved_models/tiny", "is a file", "expected a folder", "another"
    ),
    "a log folder that is a file": (
        replaced("new/runs", "x"), "new/runs", "is a file", "expected a folder", "another"
    ),
    "a model JSON that may not be read": (unreadable("model.json"), "model.json", "Permission denied", "expected read and write permission", "grant it"),
    "a shard that may not be read": (unreadable(f"data/{SHARD}"), SHARD, "Permission denied", "expected read and write permission", "grant it"),
    "a data folder that may not be read": (unreadable("data"), "data", "Permission denied", "expected read and write permission", "grant it"),
    "a tokenizer that may not be read": (unreadable("tokenizer/tokenizer.json"), "tokenizer.json", "Permission denied", "expected read and write permission", "grant it"),
    "weights that may not be read": (
        both(unreadable("hf/model.safetensors"), words("--use_pretrain", "{root}/hf")), "model.safetensors", "ermission denied", "expected read and write permission", "grant it"
    ),
}  # fmt: skip

CASES = [*table(TRAIN, {f"{kind}, {name}": row for kind, rows in (
    ("shards", SHARDS), ("checkpoints", CHECKPOINTS), ("first weights", FIRST_WEIGHTS), ("environment", ENVIRONMENT),
    ("places", PLACES),
) for name, row in rows.items()})]  # fmt: skip
