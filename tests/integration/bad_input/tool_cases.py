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
    """Rows of 16 tokens, which the good setup does not have."""
    write_nvidia_shard(setup.root / "short" / "wiki_training_0.hdf5", make_rows(20, 16, 4, seed=3))
    edited("model.json", "data.mixed_seq_datasets.16", {"wiki": "short"})(setup)
    section = {"num_epochs": 1, "warmup_proportion": 0.1, "learning_rate": 0.003, "total_training_steps": 6}
    edited("model.json", "mixed_seq_training.16", section)(setup)


PREPARE = {
    "no flags": (only(), "--input", "required", "are required: --input, --output_dir", "see --help"),
    "an unknown flag": (words("--dupe_facter", "3"), "--dupe_facter", "unknown flag", "did you mean '--dupe_factor'?", "did you mean '--dupe_factor'?"),
    "a word for a number": (words("--workers", "all"), "--workers", "found 'all'", "expected a whole number of at least 1", "see --help"),
    "no workers": (words("--workers", "0"), "--workers", "found '0'", "expected a whole number of at least 1", "see --help"),
    "two tokenizers": (words("--vocab_size", "100"), "--vocab_size", "not allowed with", "not allowed with argument --vocab_file", "see --help"),
    "no such input": (words("--input", "{root}/lost"), "--input {root}/lost", "no such file or folder", "files, folders, globs or URLs of text", "give files"),
    "shards for text": (words("--input", "{root}/data"), "hdf5", "named like an HDF5 shard", "expected text", "give the text that it was made from"),
    "an empty input folder": (removed("text/*"), "--input {root}/text", "no file found", "files, folders, globs or URLs of text", "give files"),
    "an input without text": (
        both(replaced("empty.txt", "\n\n"), words("--input", "{root}/empty.txt")), "empty.txt", "no document", "files with text in UTF-8", "give files"
    ),
    "an input of bytes": (
        both(replaced("b.txt", bytes(range(256)) * 50), words("--input", "{root}/b.txt")), "b.txt", "no document", "files with text in UTF-8", "give files"
    ),
    "JSON Lines with another field": (
        both(replaced("a.jsonl", '{"label": 1, "sentence": "A few words."}\n' * 3), words("--input", "{root}/a.jsonl")), "a.jsonl", "no field 'text' in 3 lines", "they have 'label', 'sentence'", "pass --text_field 'sentence'"
    ),
    "a CSV with another column": (
        both(replaced("a.csv", "label,sentence\n1,A few words.\n"), words("--input", "{root}/a.csv")), "a.csv", "has no column 'text'", "its first line names 'label', 'sentence'", "pass --text_field 'sentence'"
    ),
    "a PDF": (
        both(replaced("a.pdf", b"%PDF-1.7"), words("--input", "{root}/a.pdf")), "a.pdf", "not a text file", "expected text, HTML, JSON", "convert it to text"
    ),
    "a PDF named as text": (
        both(replaced("a.txt", b"%PDF-1.7\nA few words here."), words("--input", "{root}/a.txt")), "a.txt", "is a PDF", "expected text, HTML, JSON", "convert it to text"
    ),
    "XML that is no dump": (
        both(replaced("a.xml", "<feed><entry>A few words.</entry></feed>"), words("--input", "{root}/a.xml")), "a.xml", "not a dump of a wiki", "expected text, HTML, JSON", "convert it to text"
    ),
    "a zip that is none": (
        both(replaced("a.zip", "x"), words("--input", "{root}/a.zip")), "a.zip", "damaged or cut short", "files with text in UTF-8", "copy them again"
    ),
    "a Parquet file that is none": (
        both(replaced("a.parquet", "x"), words("--input", "{root}/a.parquet")), "a.parquet", "damaged or cut short", "files with text in UTF-8", "copy them again"
    ),
    "an archive that is none": (
        both(replaced("a.txt.gz", "x"), words("--input", "{root}/a.txt.gz")), "a.txt.gz", "damaged or cut short", "files with text in UTF-8", "copy them again"
    ),
    "a dataset that cannot be loaded": (
        both(variables(HF_HUB_OFFLINE="1"), words("--input", "hf:nobody/nothing")), "hf:nobody/nothing", "cannot be loaded", "expected a dataset of the Hugging Face hub", "save_to_disk()"
    ),
    "a URL of no known kind": (words("--input", "gopher://x/y"), "gopher://x/y", "cannot be read", "the file system's package for fsspec", "fsspec"),
    "an input that may not be read": (unreadable("text/a.txt"), "a.txt", "ermission denied", "expected a file that this user may read", "right"),
    "no such vocabulary": (words("--vocab_file", "{root}/lost"), "lost", "no such tokenizer", "a vocab.txt, a tokenizer.json or a folder with one", "give a vocab.txt"),
    "a vocabulary too small": (
        only("--input", "{root}/text", *FRESH, "--vocab_size", "50"), "--vocab_size 50", "too small for an alphabet", "BERT uses 30522", "30522"
    ),
    "a vocabulary trained on nothing": (
        only("--input", "{root}/text", *FRESH, "--vocab_size", "100", "--tokenizer_sample_mb", "0"), "--tokenizer_sample_mb", "found '0'", "expected a whole number of at least 1", "see --help"
    ),
    "rows too short": (words("--max_seq_length", "4"), "--max_seq_length 4", "out of range", "expected 8 to 8192, usually 128 or 512", "usually 128 or 512"),
    "a length twice": (words("--max_seq_length", "24", "24", "--max_predictions_per_seq", "4", "4"), "--max_seq_length: 24", "more than once", "each length is one output folder", "give each once"),
    "lengths and predictions that do not pair": (
        words("--max_seq_length", "24", "32"), "--max_predictions_per_seq", "1 value for 2", "one for each, such as 20 for 128", "give one for each"
    ),
    "more predictions than tokens": (words("--max_predictions_per_seq", "99"), "--max_predictions_per_seq 99", "24 tokens", "try 4", "try 4"),
    "masking all": (words("--masking_rate", "1"), "--masking_rate 1.0", "out of range", "expected 0 to 1, usually 0.15", "usually 0.15"),
    "nothing to train on": (words("--validation_share", "0.6", "--test_share", "0.6"), "--validation_share", "nothing", "expected less than 1 together", "smaller"),
    "a split that takes every document": (words("--validation_share", "0.9999"), "--max_seq_length 24", "not one row", "a smaller --validation_share", "give more text"),
    "copies below zero": (words("--dupe_factor", "-1"), "--dupe_factor -1", "out of range", "expected 0 (no masks) or a number of copies", "expected 0"),
    "a seed below zero": (words("--seed", "-1"), "--seed", "found '-1'", "expected a whole number from 0 to 2^63 - 1, such as 42", "see --help"),
    "a similarity beyond one": (words("--near_duplicates", "2"), "--near_duplicates 2.0", "out of range", "expected a similarity such as 0.8", "0.8"),
    "other settings in the same place": (words("--output_dir", "{root}/prepared", "--seed", "7"), "prepared/24", "other settings", "expected none, or those of the same command", "--overwrite"),
    "somebody's shards in the same place": (replaced("fresh/24/wiki_training_0.hdf5", "x"), "fresh/24", "wiki_training_0.hdf5", "expected none", "--overwrite"),
    "a manifest that is no JSON": (both(replaced("prepared/24/manifest.json", "{"), words("--output_dir", "{root}/prepared")), "manifest.json", "not a manifest", "expected one written by this command", "--overwrite"),
    "the output is a file": (words("--output_dir", "{root}/model.json"), "--output_dir", "is a file", "expected a folder", "another"),
    "the output is immutable": (both(immutable("mine"), words("--output_dir", "{root}/mine")), "--output_dir", "cannot be written", "expected a folder that this user can write to", "another"),
    "the tokenizer's folder is a file": (
        words("--tokenizer_dir", "{root}/model.json"), "--tokenizer_dir", "is a file", "expected a folder", "another"
    ),
    "the work folder is somebody's": (words("--work_dir", "{root}/data"), "data", "not a work folder", "expected a new or empty folder, or a work folder of this command", "another --work_dir"),
    "the work folder is a file": (words("--work_dir", "{root}/model.json"), "--work_dir", "is a file", "expected a folder", "another"),
    "Dask without an address": (words("--executor", "dask"), "--executor dask", "needs", "needs --scheduler ADDRESS, such as tcp://host:8786", "--scheduler"),
}  # fmt: skip

CORPUS = {
    "no flags": (only(), "--output", "required", "the following arguments are required: --output", "see --help"),
    "an unknown flag": (words("--max_gb", "1"), "--max_gb", "unknown flag", "did you mean '--max_mb'?", "did you mean '--max_mb'?"),
    "no text": (words("--max_mb", "0"), "--max_mb", "found 0", "expected a number of megabytes, more than 0", "more than 0"),
    "text without end": (words("--max_mb", "nan"), "--max_mb", "found nan", "expected a number of megabytes, more than 0", "more than 0"),
    "no workers": (words("--workers", "0"), "--workers", "found '0'", "expected a whole number of at least 1", "see --help"),
    "the output is a file": (words("--output", "{root}/model.json"), "--output", "is a file", "expected a folder", "another"),
    "the output cannot be written": (both(unwritable("mine"), words("--output", "{root}/mine")), "--output", "cannot be written", "expected a folder that this user can write to", "another"),
}  # fmt: skip

INSPECT = {
    "no folder": (only("{root}/lost"), "lost", "no such folder", "one with .hdf5 shards", "Give one"),
    "an empty folder": (only("{root}/tokenizer"), "tokenizer", "no .hdf5 file", "to <output_dir>/<length>", "data.prepare"),
    "a flag that is none": (words("--verify"), "--verify", "unknown flag", "did you mean '--verify_data'?", "did you mean '--verify_data'?"),
    "a shard cut short": (cut_short("prepared/24/training*.hdf5"), "training_0000", "damaged or incomplete", "expected a complete HDF5 file", "copy it again"),
    "a manifest that is no JSON": (replaced("prepared/24/manifest.json", "{"), "manifest.json", "is not a manifest", "expected one that `python -m data.prepare` wrote", "Prepare it again"),
    "no such tokenizer": (words("--vocab_file", "{root}/lost"), "lost", "no such tokenizer", "a vocab.txt, a tokenizer.json or a folder with one", "give a vocab.txt"),
    "the report's folder is a file": (words("--report_dir", "{root}/model.json"), "--report_dir", "is a file", "expected a folder", "another"),
}  # fmt: skip

EXPORT = {
    "no flags": (only(), "--checkpoint", "required", "the following arguments are required: --checkpoint, --output", "see --help"),
    "no checkpoint": (words("--checkpoint", "{root}/lost"), "lost", "no such folder", "a run's <output_dir>/saved_models/<job_name>", "Pass a run's"),
    "a folder without any": (words("--checkpoint", "{root}/data"), "data", "no complete checkpoint", "a run's <output_dir>/saved_models/<job_name>", "Pass a run's"),
    "the output is a file": (words("--output", "{root}/model.json"), "--output", "is a file", "expected a folder", "another"),
    "the output cannot be written": (both(unwritable("mine"), words("--output", "{root}/mine")), "--output", "cannot be written", "expected a folder that this user can write to", "another"),
    "an output with other files": (
        both(replaced("mine/README.md", "my notes"), words("--output", "{root}/mine")), "--output", "is not empty and not an earlier export (found: README.md)", "expected", "a new folder"
    ),
    "an output with another model": (
        both(replaced("mine/model.safetensors", b"\x02\0\0\0\0\0\0\0{}"), words("--output", "{root}/mine")), "--output", "not an earlier export", "expected", "a new folder"
    ),
    "no best checkpoint": (
        words("--export", "best"), "--export best", "has no best checkpoint", "a run with --keep_best or --keep_best_by marks", "pass --export last"
    ),
    "another tokenizer": (
        both(replaced("v.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"), words("--tokenizer", "{root}/v.txt")), "v.txt", "has 5 tokens", "but the checkpoint's model has 61", "Pass the tokenizer"
    ),
    "no such tokenizer": (words("--tokenizer", "{root}/lost"), "lost", "no such tokenizer", "a vocab.txt, a tokenizer.json or a folder with one", "give a vocab.txt"),
    "no such figures": (words("--metrics", "{root}/lost.jsonl"), "lost.jsonl", "no such file", "expected <output_dir>/runs/<job_name>/metrics.jsonl", "give that one"),
    "figures that are none": (replaced(METRICS, "[1]\n"), "metrics.jsonl", "line 1", "expected <output_dir>/runs/<job_name>/metrics.jsonl", "metrics.jsonl"),
    "figures without the loss": (replaced(METRICS, '{"kind": "validation", "step": 1}\n'), "metrics.jsonl", "mlm_loss", "expected <output_dir>/runs/<job_name>/metrics.jsonl", "metrics.jsonl"),
}  # fmt: skip

PREDICT = {
    "no text": (words(), "no text given", "[MASK]", "Pass one with [MASK] in it", "--pair"),
    "no model": (only("--model", "{root}/lost", "a [MASK]"), "lost", "does not exist", "expected a folder written by scripts/export_hf.py", "Check --model"),
    "no config": (both(removed("hf/config.json"), words("a [MASK]")), "hf", "no config.json", "expected a folder written by scripts/export_hf.py", "export_hf.py"),
    "no tokenizer": (both(removed("hf/tokenizer.json"), words("a [MASK]")), "hf", "no tokenizer.json", "tokenizer.json", "--tokenizer"),
    "no weights": (both(removed("hf/*.safetensors"), words("a [MASK]")), "hf", "model.safetensors", "expected a folder that scripts/export_hf.py wrote", "export it again"),
    "weights cut short": (both(cut_short("hf/model.safetensors"), words("a [MASK]")), "hf", "cannot be loaded", "expected a folder that scripts/export_hf.py wrote", "export it again"),
    "a config that is no JSON": (both(replaced("hf/config.json", "{"), words("a [MASK]")), "hf", "cannot be loaded", "expected a folder that scripts/export_hf.py wrote", "export it again"),
    "a config of no known model": (
        both(edited("hf/config.json", "model_type", "none"), words("a [MASK]")), "hf", "cannot be loaded", "expected a folder that scripts/export_hf.py wrote", "export it again"
    ),
    "no mask": (words("a word"), "'a word'", "has no [MASK]", "where a word should be predicted", "Put one"),
    "a text too long": (words("word1 " * 100 + "[MASK]"), "word1", "tokens", "but the model has 32 positions", "Shorten"),
    "more guesses than tokens": (words("--top", "1000", "a [MASK]"), "--top 1000", "61 tokens", "the model has 61 tokens", "at most"),
}  # fmt: skip

PLOT = {
    "no run": (only("{root}/lost", "--output", "{root}/a.png"), "lost", "no such file", "expected <output_dir>/runs/<job_name>/metrics.jsonl", "give that one"),
    "another kind of picture": (words("--output", "{root}/a.jpg"), "a.jpg", ".jpg", "expected a name that ends with .png or .html", ".png or .html"),
    "figures without one": (replaced(METRICS, ""), "metrics.jsonl", "has no metrics", "after --print_steps steps", "--print_steps"),
    "figures that are none": (replaced(METRICS, "[1]\n"), "metrics.jsonl", "line 1", "expected <output_dir>/runs/<job_name>/metrics.jsonl", "metrics.jsonl"),
    "figures that are no text": (replaced(METRICS, b"\xff\xfe\n"), "metrics.jsonl", "line 1", "expected <output_dir>/runs/<job_name>/metrics.jsonl", "metrics.jsonl"),
    "the output is below a file": (words("--output", "{root}/model.json/a.png"), "--output", "is a file", "expected a folder", "another"),
    "the output is a folder": (
        both(replaced("a.png/x", ""), words("--output", "{root}/a.png")), "a.png", "folder", "ends with .png or .html", "another"
    ),
}  # fmt: skip

COMPARE = {
    "no figures": (words("--metrics", "{root}/lost"), "lost", "no such file", "expected <output_dir>/runs/<job_name>/metrics.jsonl", "give that one"),
    "no validation": (replaced(METRICS, '{"kind": "train", "step": 1}\n'), "metrics.jsonl", "no validation", "expected <output_dir>/runs/<job_name>/metrics.jsonl", "metrics.jsonl"),
    "no data": (words("--data", "{root}/lost"), "lost", "no such folder", "expected one with shards", "data.prepare"),
    "another width": (words("--max_seq_length", "128"), "--max_seq_length is 128", "24 tokens wide", "but --max_seq_length is 128", "pass --max_seq_length 24"),
}  # fmt: skip

SECTIONS = {
    "equal lengths": (words("--lengths", "24", "24"), "--lengths 24 24", "differ", "must differ in length", "128 512"),
    "a name that leaves the folder": (words("--name", "../up"), "'../up", "plain name", "must be a single plain name", "--name"),
    "a mistake in the second phase": (words(), "model.json", "no entry for rows of 16 tokens", "a length that it has", 'Add "16"'),
    "no such file for the second phase": (
        words("--deepspeed_configs", "{root}/deepspeed.json", "{root}/lost.json"), "lost.json", "no such file", "expected a DeepSpeed JSON (--deepspeed_config)", "DeepSpeed JSON"
    ),
    "phases that cannot follow each other": (
        both(second_phase, replaced("other.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}'),
             words("--deepspeed_configs", "{root}/deepspeed.json", "{root}/other.json")),
        "phase 2 cannot start", "stage 0 in fp32, but this run uses stage 2", "but this run uses stage 2 in fp32", "the same DeepSpeed JSON",
    ),
    "a flag that the launcher has not": (words("--max_step", "3"), "--max_step", "unknown flag", "did you mean '--max_steps'?", "did you mean '--max_steps'?"),
}  # fmt: skip

DOCTOR = {
    "no ranks": (words("--ranks", "0"), "--ranks", "found '0'", "expected a whole number of at least 1", "see --help"),
    "a data URL": (words("--data_path_prefix", "s3://a/b"), "--data_path_prefix", "found the URL s3://a/b", "expected a folder", "leave the flag out"),
    "an unknown flag": (words("--rank", "1"), "--rank'", "unknown flag", "did you mean '--ranks'?", "did you mean '--ranks'?"),
}  # fmt: skip

CASES = [
    *table("data.prepare", PREPARE),
    *table("data.corpus", CORPUS),
    *table("data.inspect", INSPECT),
    *table("export_hf.py", EXPORT),
    *table("predict.py", PREDICT),
    *table("plot_run.py", PLOT),
    *table("compare_unigram.py", COMPARE),
    *table("two_phases.py", SECTIONS),
    *table("doctor.py", DOCTOR),
]
