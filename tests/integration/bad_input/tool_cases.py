"""Bad input for the commands around training."""

from tests.integration.bad_input.case import (
    Setup,
    both,
    cut_short,
    edited,
    immutable,
    only,
    removed,
    replaced,
    table,
    unreadable,
    unwritable,
    variables,
    words,
)
from tests.support import make_rows, write_nvidia_shard

METRICS = "out/runs/tiny/metrics.jsonl"
FRESH = ("--output_dir", "{root}/fresh")


def second_phase(setup: Setup) -> None:
    """Rows of 16, which the good setup has not."""
    write_nvidia_shard(setup.root / "short" / "wiki_training_0.hdf5", make_rows(20, 16, 4, seed=3))
    edited("model.json", "data.mixed_seq_datasets.16", {"wiki": "short"})(setup)
    section = {"num_epochs": 1, "warmup_proportion": 0.1, "learning_rate": 0.003, "total_training_steps": 6}
    edited("model.json", "mixed_seq_training.16", section)(setup)


PREPARE = {
    "no flags": (only(), "--input", "required", "see --help"),
    "an unknown flag": (words("--dupe_facter", "3"), "--dupe_facter", "unknown flag", "did you mean '--dupe_factor'?"),
    "a word for a number": (words("--workers", "all"), "--workers", "found 'all'", "at least 1"),
    "no workers": (words("--workers", "0"), "--workers", "found '0'", "at least 1"),
    "two tokenizers": (words("--vocab_size", "100"), "--vocab_size", "not allowed with", "--vocab_file"),
    "no such input": (words("--input", "{root}/lost"), "--input {root}/lost", "no file found", "give files"),
    "an empty input folder": (removed("text/*"), "--input {root}/text", "no file found", "give files"),
    "an input without text": (
        both(replaced("empty.txt", "\n\n"), words("--input", "{root}/empty.txt")), "empty.txt", "no document", "text in UTF-8"
    ),
    "an input of bytes": (
        both(replaced("b.txt", bytes(range(256)) * 50), words("--input", "{root}/b.txt")), "b.txt", "no document", "text in UTF-8"
    ),
    "a Parquet file that is none": (
        both(replaced("a.parquet", "x"), words("--input", "{root}/a.parquet")), "a.parquet", "damaged or cut short", "copy them again"
    ),
    "an archive that is none": (
        both(replaced("a.txt.gz", "x"), words("--input", "{root}/a.txt.gz")), "a.txt.gz", "damaged or cut short", "copy them again"
    ),
    "a dataset that cannot be loaded": (
        both(variables(HF_HUB_OFFLINE="1"), words("--input", "hf:nobody/nothing")), "hf:nobody/nothing", "cannot be loaded", "save_to_disk()"
    ),
    "a URL of no known kind": (words("--input", "gopher://x/y"), "gopher://x/y", "cannot be read", "fsspec"),
    "an input that may not be read": (unreadable("text/a.txt"), "a.txt", "ermission denied", "right"),
    "no such vocabulary": (words("--vocab_file", "{root}/lost"), "lost", "no such tokenizer", "give a vocab.txt"),
    "a vocabulary too small": (
        only("--input", "{root}/text", *FRESH, "--vocab_size", "50"), "--vocab_size 50", "too small for an alphabet", "30522"
    ),
    "a vocabulary trained on nothing": (
        only("--input", "{root}/text", *FRESH, "--vocab_size", "100", "--tokenizer_sample_mb", "0"), "--tokenizer_sample_mb", "found '0'", "at least 1"
    ),
    "rows too short": (words("--max_seq_length", "4"), "--max_seq_length 4", "out of range", "usually 128 or 512"),
    "a length twice": (words("--max_seq_length", "24", "24", "--max_predictions_per_seq", "4", "4"), "--max_seq_length: 24", "more than once", "give each once"),
    "lengths and predictions that do not pair": (
        words("--max_seq_length", "24", "32"), "--max_predictions_per_seq", "1 values for 2", "one for each"
    ),
    "more predictions than tokens": (words("--max_predictions_per_seq", "99"), "--max_predictions_per_seq 99", "24 tokens", "try 4"),
    "masking all": (words("--masking_rate", "1"), "--masking_rate 1.0", "out of range", "usually 0.15"),
    "nothing to train on": (words("--validation_share", "0.6", "--test_share", "0.6"), "--validation_share", "nothing", "smaller"),
    "a split that takes every document": (words("--validation_share", "0.9999"), "--max_seq_length 24", "not one row", "smaller --validation_share"),
    "copies below zero": (words("--dupe_factor", "-1"), "--dupe_factor -1", "negative", "expected 0"),
    "a seed below zero": (words("--seed", "-1"), "--seed", "found '-1'", "expected a whole number from 0"),
    "a similarity beyond one": (words("--near_duplicates", "2"), "--near_duplicates 2.0", "out of range", "0.8"),
    "other settings in the same place": (words("--output_dir", "{root}/prepared", "--seed", "7"), "prepared/24", "other settings", "--overwrite"),
    "somebody's shards in the same place": (replaced("fresh/24/wiki_training_0.hdf5", "x"), "fresh/24", "wiki_training_0.hdf5", "--overwrite"),
    "a manifest that is no JSON": (both(replaced("prepared/24/manifest.json", "{"), words("--output_dir", "{root}/prepared")), "manifest.json", "no manifest", "--overwrite"),
    "the output is a file": (words("--output_dir", "{root}/model.json"), "--output_dir", "is a file", "another"),
    "the output is immutable": (both(immutable("mine"), words("--output_dir", "{root}/mine")), "--output_dir", "cannot be written", "another"),
    "the tokenizer's folder is a file": (
        words("--tokenizer_dir", "{root}/model.json"), "--tokenizer_dir", "is a file", "another"
    ),
    "the work folder is somebody's": (words("--work_dir", "{root}/data"), "data", "no work folder", "another --work_dir"),
    "the work folder is a file": (words("--work_dir", "{root}/model.json"), "--work_dir", "is a file", "another"),
    "Dask without an address": (words("--executor", "dask"), "--executor dask", "needs", "--scheduler"),
}  # fmt: skip

CORPUS = {
    "no flags": (only(), "--output", "required", "see --help"),
    "an unknown flag": (words("--max_gb", "1"), "--max_gb", "unknown flag", "did you mean '--max_mb'?"),
    "no text": (words("--max_mb", "0"), "--max_mb", "found 0", "more than 0"),
    "text without end": (words("--max_mb", "nan"), "--max_mb", "found nan", "more than 0"),
    "no workers": (words("--workers", "0"), "--workers", "found '0'", "at least 1"),
    "the output is a file": (words("--output", "{root}/model.json"), "--output", "is a file", "another"),
    "the output cannot be written": (both(unwritable("mine"), words("--output", "{root}/mine")), "--output", "cannot be written", "another"),
}  # fmt: skip

INSPECT = {
    "no folder": (only("{root}/lost"), "lost", "no such folder", "give one"),
    "an empty folder": (only("{root}/tokenizer"), "tokenizer", "no .hdf5 file", "data.prepare"),
    "a flag that is none": (words("--verify"), "--verify", "unknown flag", "did you mean '--verify_data'?"),
    "a shard cut short": (cut_short("prepared/24/training*.hdf5"), "training_0000", "damaged or incomplete", "copy it again"),
    "a manifest that is no JSON": (replaced("prepared/24/manifest.json", "{"), "manifest.json", "no manifest", "prepare it anew"),
    "no such tokenizer": (words("--vocab_file", "{root}/lost"), "lost", "no such tokenizer", "give a vocab.txt"),
    "the report's folder is a file": (words("--report_dir", "{root}/model.json"), "--report_dir", "is a file", "another"),
}  # fmt: skip

EXPORT = {
    "no flags": (only(), "--checkpoint", "required", "see --help"),
    "no checkpoint": (words("--checkpoint", "{root}/lost"), "lost", "no such folder", "saved_models/<job_name>"),
    "a folder without any": (words("--checkpoint", "{root}/data"), "data", "no complete checkpoint", "saved_models/<job_name>"),
    "the output is a file": (words("--output", "{root}/model.json"), "--output", "is a file", "another"),
    "the output cannot be written": (both(unwritable("mine"), words("--output", "{root}/mine")), "--output", "cannot be written", "another"),
    "an output with other files": (
        both(replaced("mine/README.md", "my notes"), words("--output", "{root}/mine")), "--output", "is not empty and holds no export of ours (found: README.md)", "a new folder"
    ),
    "an output with another model": (
        both(replaced("mine/model.safetensors", b"\x02\0\0\0\0\0\0\0{}"), words("--output", "{root}/mine")), "--output", "holds no export of ours", "a new folder"
    ),
    "another tokenizer": (
        both(replaced("v.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"), words("--tokenizer", "{root}/v.txt")), "v.txt", "has 5 tokens", "pass the tokenizer"
    ),
    "no such tokenizer": (words("--tokenizer", "{root}/lost"), "lost", "no such tokenizer", "give a vocab.txt"),
    "no such figures": (words("--metrics", "{root}/lost.jsonl"), "lost.jsonl", "no such file", "metrics.jsonl"),
    "figures that are none": (replaced(METRICS, "[1]\n"), "metrics.jsonl", "line 1", "metrics.jsonl"),
    "figures without the loss": (replaced(METRICS, '{"kind": "validation", "step": 1}\n'), "metrics.jsonl", "mlm_loss", "metrics.jsonl"),
}  # fmt: skip

PREDICT = {
    "no text": (words(), "there is no text", "[MASK]", "--pair"),
    "no model": (only("--model", "{root}/lost", "a [MASK]"), "lost", "no config.json", "export_hf.py"),
    "no tokenizer": (both(removed("hf/tokenizer.json"), words("a [MASK]")), "hf", "no tokenizer.json", "--tokenizer"),
    "no weights": (both(removed("hf/*.safetensors"), words("a [MASK]")), "hf", "model.safetensors", "export it again"),
    "weights cut short": (both(cut_short("hf/model.safetensors"), words("a [MASK]")), "hf", "cannot be loaded", "export it again"),
    "a config that is no JSON": (both(replaced("hf/config.json", "{"), words("a [MASK]")), "hf", "cannot be loaded", "export it again"),
    "a config of no known model": (
        both(edited("hf/config.json", "model_type", "none"), words("a [MASK]")), "hf", "cannot be loaded", "export it again"
    ),
    "no mask": (words("a word"), "'a word'", "has no [MASK]", "put one"),
    "a text too long": (words("word1 " * 100 + "[MASK]"), "word1", "tokens", "shorten"),
    "more guesses than tokens": (words("--top", "1000", "a [MASK]"), "--top 1000", "61 tokens", "at most"),
}  # fmt: skip

PLOT = {
    "no run": (only("{root}/lost", "--output", "{root}/a.png"), "lost", "no such file", "<output_dir>/runs/<job_name>"),
    "another kind of picture": (words("--output", "{root}/a.jpg"), "a.jpg", ".jpg", ".png or .html"),
    "figures without one": (replaced(METRICS, ""), "metrics.jsonl", "no figures", "--print_steps"),
    "figures that are none": (replaced(METRICS, "[1]\n"), "metrics.jsonl", "line 1", "metrics.jsonl"),
    "figures that are no text": (replaced(METRICS, b"\xff\xfe\n"), "metrics.jsonl", "line 1", "metrics.jsonl"),
    "the output is below a file": (words("--output", "{root}/model.json/a.png"), "--output", "is a file", "another"),
    "the output is a folder": (
        both(replaced("a.png/x", ""), words("--output", "{root}/a.png")), "a.png", "folder", "another"
    ),
}  # fmt: skip

COMPARE = {
    "no figures": (words("--metrics", "{root}/lost"), "lost", "no such file", "metrics.jsonl"),
    "no validation": (replaced(METRICS, '{"kind": "train", "step": 1}\n'), "metrics.jsonl", "no validation", "metrics.jsonl"),
    "no data": (words("--data", "{root}/lost"), "lost", "no such folder", "data.prepare"),
    "another width": (words("--max_seq_length", "128"), "--max_seq_length is 128", "24 tokens wide", "pass --max_seq_length 24"),
}  # fmt: skip

PHASES = {
    "equal lengths": (words("--lengths", "24", "24"), "--lengths 24 24", "differ", "128 512"),
    "a name that leaves the folder": (words("--name", "../up"), "'../up", "plain name", "--name"),
    "a mistake in the second phase": (words(), "model.json", "no entry for --max_seq_length 16", 'add "16"'),
    "no such file for the second phase": (
        words("--deepspeed_configs", "{root}/deepspeed.json", "{root}/lost.json"), "lost.json", "no such file", "DeepSpeed JSON"
    ),
    "phases that cannot follow each other": (
        both(second_phase, replaced("other.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}'),
             words("--deepspeed_configs", "{root}/deepspeed.json", "{root}/other.json")),
        "phase 2 cannot go on", "stage 0 in fp32, but this run uses stage 2", "the same DeepSpeed JSON",
    ),
    "a flag that the launcher has not": (words("--max_step", "3"), "--max_step", "unknown flag", "did you mean '--max_steps'?"),
}  # fmt: skip

DOCTOR = {
    "no ranks": (words("--ranks", "0"), "--ranks", "found '0'", "at least 1"),
    "an unknown flag": (words("--rank", "1"), "--rank'", "unknown flag", "did you mean '--ranks'?"),
}  # fmt: skip

SUPERVISE = {
    "no command": (only("--max_restarts", "3"), "no command to run", "put it behind --", "deepspeed"),
    "an unknown flag": (only("--max_restart", "3", "--", "true"), "--max_restart", "unknown flag", "did you mean '--max_restarts'?"),
    "restarts below zero": (only("--max_restarts", "-1", "--", "true"), "--max_restarts", "found '-1'", "from 0 up"),
    "a pause that is a word": (only("--pause", "long", "--", "true"), "--pause", "'long'", "see --help"),
    "a command that does not say its ranks": (only("--fewer_ranks", "--", "python", "a.py"), "--fewer_ranks", "needs a command with", "--num_gpus"),
    "a command that is none": (only("--", "no-such-command"), "no-such-command", "cannot be started", "environment"),
}  # fmt: skip

CASES = [
    *table("data.prepare", PREPARE),
    *table("data.corpus", CORPUS),
    *table("data.inspect", INSPECT),
    *table("export_hf.py", EXPORT),
    *table("predict.py", PREDICT),
    *table("plot_run.py", PLOT),
    *table("compare_unigram.py", COMPARE),
    *table("two_phases.py", PHASES),
    *table("doctor.py", DOCTOR),
    *table("supervise.py", SUPERVISE),
]
