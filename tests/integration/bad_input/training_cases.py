"""Bad input for the launcher: flags, the two JSON files, the tokenizer."""

from tokenizers import Tokenizer, models

from tests.integration.bad_input.case import (
    both,
    cut_short,
    edited,
    link_to_nothing,
    only,
    removed,
    replaced,
    table,
    without,
    words,
)

TRAIN = "deepspeed_train.py"
_ROLES = {token: i for i, token in enumerate(("<s>", "<pad>", "</s>", "<unk>"))}
WITHOUT_MASK = Tokenizer(models.WordLevel(_ROLES, unk_token="<unk>")).to_str()

FLAGS = {
    "no flags": (only(), "--config-file/--cf", "arguments are required", "are required", "see --help"),
    "an export above the run's own folders": (words("--output_dir", "{root}/new", "--export_dir", "{root}/new"), "--export_dir", "the run itself writes to that folder", "expected a separate folder", "pass for example"),
    "an export among the run's checkpoints": (words("--output_dir", "{root}/new", "--export_dir", "{root}/new/saved_models/tiny"), "--export_dir", "the run itself writes to that folder", "expected a separate folder", "pass for example"),
    "an export into a folder of other files": (words("--export_dir", "{root}/data"), "--export_dir", "is not empty", "expected", "a new folder"),
    "an export without its folder": (words("--export", "last"), "--export last", "needs --export_dir", "the folder to write", "pass both or neither"),
    "an export of the best checkpoint without keeping it": (
        words("--export", "best", "--export_dir", "{root}/hf2"), "--export best", "needs --keep_best", "the checkpoint with the lowest validation loss", "pass --export last"
    ),
    "an export of the best checkpoint without validation": (
        both(without("model.json", "validation"), words("--export", "best", "--keep_best", "--export_dir", "{root}/hf2")),
        "--export best", "without validation data", "expected a folder with validation shards", "or pass --export last",
    ),
    "an export of a model that no stock class has": (
        both(edited("model.json", "bert_model_config.hidden_act", "geglu"), words("--export_dir", "{root}/hf")),
        "--export_dir", "cannot be exported", "RobertaPreLayerNormForMaskedLM, which has gelu", "drop --export_dir",
    ),
    "an unknown flag": (words("--max_step", "3"), "--max_step'", "unknown flag", "did you mean '--max_steps'?", "did you mean '--max_steps'?"),
    "an unknown flag without a similar name": (words("--zzzzzz"), "--zzzzzz", "unknown flag", "expected one that --help lists", "remove it"),
    "a flag of other programs": (words("--batch_size", "3"), "--batch_size", "unknown flag", "the rows per step", "pass --train_batch_size N"),
    "a setting without a value": (words("--set", "train_batch_size"), "--set", "found 'train_batch_size'", "expected KEY=VALUE", "such as mixed_seq_training.128.learning_rate=4e-4"),
    "a setting of a key without its block": (words("--set", "learning_rate=1"), "--set learning_rate=1", "neither JSON file has a key 'learning_rate'", "mixed_seq_training.<max_seq_length>.learning_rate=VALUE", "pass --set"),
    "a setting of an unknown key": (words("--set", "gradient_cliping=1"), "--set gradient_cliping=1", "neither JSON file has a key", "did you mean 'gradient_clipping'?", "did you mean 'gradient_clipping'?"),
    "a setting below a number": (words("--set", "train_batch_size.x=1"), "--set train_batch_size.x=1", "train_batch_size is 8", "expected an object", "set train_batch_size itself"),
    "a wrong value in a setting": (words("--set", "mixed_seq_training.24.num_epochs=few"), "--set mixed_seq_training.24.num_epochs=few", "found 'few'", "expected a whole number", "expected a whole number"),
    "a value set twice": (
        words("--learning_rate", "0.1", "--set", "mixed_seq_training.24.learning_rate=0.2"), "--learning_rate 0.1", "set the same value", "expected one", "drop the other"
    ),
    "a batch size beside a batch schedule": (words("--train_batch_size", "8", "--batch_schedule", "0:8"), "--train_batch_size", "both give the rows per step", "expected one", "drop the other"),
    "a loose word": (words("faster"), "'faster'", "unexpected word", "expected flags and their values", "remove it"),
    "a flag without its value": (words("--seed"), "--seed", "argument --seed:", "expected one argument", "see --help"),
    "a word for a number": (words("--max_steps", "many"), "--max_steps", "found 'many'", "expected a whole number of at least 1", "see --help"),
    "no steps": (words("--max_steps", "0"), "--max_steps", "found '0'", "expected a whole number of at least 1", "see --help"),
    "a seed that is not a number": (words("--seed", "abc"), "--seed", "found 'abc'", "expected a whole number from 0 to 2^63 - 1, such as 42", "see --help"),
    "a seed below zero": (words("--seed", "-4"), "--seed", "-4", "expected a whole number from 0 to 2^63 - 1, such as 42", "see --help"),
    "a seed beyond 64 bits": (words("--seed", str(2**70)), "--seed", str(2**70), "expected a whole number from 0 to 2^63 - 1, such as 42", "see --help"),
    "an unknown choice": (words("--lr_schedule", "LF"), "--lr_schedule", "'LF'", "'EE', 'EP', 'LE'", "see --help"),
    "a negative rate offset": (words("--lr_offset", "-0.1"), "--lr_offset", "found '-0.1'", "expected a finite number of at least 0, such as 0.0", "see --help"),
    "a negative rate offset with an exponent": (words("--lr_offset", "-1e-3"), "--lr_offset", "found '-1e-3'", "expected a finite number of at least 0, such as 0.0", "see --help"),
    "a prefix that is not a folder": (
        words("--data_path_prefix", "{root}/lost"), "--data_path_prefix {root}/lost", "no such folder", "expected the one that the model JSON's folders are relative to", "pass --data_path_prefix {root}"
    ),
    "a prefix that does not fit": (
        words("--data_path_prefix", "{root}/data"), "--data_path_prefix {root}/data", "contains none of the model JSON's paths (data", "expected the one that the model JSON's folders are relative to", "pass --data_path_prefix {root}"
    ),
    "a validation prefix that is not a folder": (
        words("--validation_data_path_prefix", "{root}/lost"), "--validation_data_path_prefix {root}/lost", "no such folder", "expected the one that the model JSON's folders are relative to", "pass it"
    ),
    "a data URL without a cache": (
        words("--data_path_prefix", "s3://bucket/corpus"), "s3://bucket/corpus", "needs --data_cache", "expected one", "pass it"
    ),
    "a cache without a data URL": (
        words("--data_cache", "{root}/cache"), "--data_cache", "--data_path_prefix is the folder {root}", "expected a URL such as s3://bucket/folder", "drop them"
    ),
    "a data URL of no known kind": (
        words("--data_path_prefix", "gopher://x", "--data_cache", "{root}/cache"), "--data_path_prefix gopher://x", "cannot be used", "expected a folder, or a URL that fsspec knows", "correct the URL"
    ),
    "a data URL without manifests": (
        words("--data_path_prefix", "file://{root}", "--data_cache", "{root}/cache"), "--data_path_prefix: file://{root}/data/manifest.json", "does not exist", "expected the manifest of the shards there", "prepare data with"
    ),
    "a cache larger than its disk": (
        words("--data_path_prefix", "file://{root}", "--data_cache", "{root}/cache", "--data_cache_gb", "1e9"), "--data_cache_gb 1e+09", "has room for", "expected at most that", "Pass less"
    ),
    "a cache of no size": (
        words("--data_path_prefix", "file://{root}", "--data_cache", "{root}/cache", "--data_cache_gb", "0"), "--data_cache_gb", "found '0'", "expected a", "see --help"
    ),
    "uploads to a URL of no known kind": (
        words("--upload_checkpoints", "gopher://x"), "--upload_checkpoints gopher://x", "cannot be used", "expected a folder, or a URL that fsspec knows", "correct the URL"
    ),
    "a rate offset that is not a number": (words("--lr_offset", "nan"), "--lr_offset", "found 'nan'", "expected a finite number of at least 0, such as 0.0", "see --help"),
    "a malformed time budget": (words("--time_budget", "soon"), "--time_budget", "found 'soon'", "90s, 45m, 24h or 1d12h", "see --help"),
    "a time budget of zero": (words("--time_budget", "0s"), "--time_budget", "0s", "expected more than zero and at most 10 years", "90s"),
    "a time budget that is too large": (words("--time_budget", "9" * 400 + "s"), "--time_budget", "999", "expected more than zero and at most 10 years", "45m"),
    "masking all": (words("--dynamic_masking", "--masking_rate", "1.5"), "--masking_rate", "found '1.5'", "expected rates between 0 and 1", "such as BERT's 0.15"),
    "masking flags alone": (words("--masking_rate", "0.3"), "--masking_rate", "apply only to masks", "masks drawn during training", "add --dynamic_masking"),
    "a malformed batch schedule": (words("--batch_schedule", "fast"), "--batch_schedule", "found 'fast'", "expected a single value, or comma-separated points tokens:value", "0:0.30,100M"),
    "a batch schedule that does not divide": (words("--batch_schedule", "0:8,1k:13"), "--batch_schedule", "13 rows per step", "expected multiples of 8, the rows of a micro-step on all ranks", "use these"),
    "sample sentences that are not there": (words("--sample_sentences", "{root}/lost.txt"), "--sample_sentences {root}/lost.txt", "cannot be read (No such file or directory)", "expected one sentence per line", "each with one [MASK]"),
    "sample sentences without a mask": (words("--sample_sentences", "{root}/model.json"), "--sample_sentences {root}/model.json", "line 1: found [MASK] 0 times", "expected one sentence per line", "Correct the line"),
    "buckets": (words("--refresh_bucket_size", "4"), "--refresh_bucket_size", "4", "expected 1, the default", "drop the flag"),
    "a fused layer": (words("--deepspeed_transformer_kernel"), "--deepspeed_transformer_kernel", "finds no CUDA device", "fused layer needs CUDA", "Drop the flag"),
    "a fused layer for what it does not compute": (
        both(edited("model.json", "bert_model_config.position_embedding_type", "relative_key"), words("--deepspeed_transformer_kernel")),
        "--deepspeed_transformer_kernel", "does not compute position_embedding_type 'relative_key'", "expected dense attention with absolute positions, gelu and", "change the model",
    ),
    "stochastic mode without the fused layer": (words("--stochastic_mode"), "--stochastic_mode", "needs", "needs --deepspeed_transformer_kernel, the layer that has this mode", "pass both or neither"),
    "sparse attention without its block": (words("--deepspeed_sparse_attention"), "deepspeed.json", "sparse_attention", "needs a block 'sparse_attention' in {root}/deepspeed.json", "add"),
    "weights without a source": (words("--finetune"), "--finetune", "weights only", "name their source", "--load_training_checkpoint or --use_pretrain"),
    "weights from two sources": (
        words("--use_pretrain", "{root}/hf", "--load_cp", "{root}/out/saved_models/tiny"), "--use_pretrain", "both", "expected one", "drop the other"
    ),
    "an id without a folder": (words("--load_cp_id", "step_1"), "--load_checkpoint_id", "needs", "needs --load_training_checkpoint, the folder of that checkpoint", "--load_training_checkpoint"),
    "a job name that leaves the folder": (words("--job_name", "../up"), "--job_name", "'../up'", "expected a plain name", "pass another --job_name"),
    "a job name of nothing": (words("--job_name", "."), "--job_name", "'.'", "expected a plain name", "pass another --job_name"),
    "a job name that is too long": (words("--job_name", "x" * 300), "--job_name", "x" * 20, "expected at most 200 bytes", "shorter"),
    "a length that the JSON does not have": (words("--max_seq_length", "16"), "model.json", "no entry for rows of 16 tokens", "a length that it has", 'Add "16"'),
    "fewer predictions than the shards have": (
        words("--max_pred", "2"), "--max_predictions_per_seq", "up to 4 predictions", "but --max_predictions_per_seq is 2", "Pass --max_predictions_per_seq 4"
    ),
    "a cased tokenizer and --do_lower_case": (
        both(replaced("cased.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nA\n"), edited("model.json", "bert_token_file", "cased.txt"),
             words("--do_lower_case")),
        "--do_lower_case", "does not lower-case", "a lower-casing tokenizer", "drop the flag",
    ),
    "pairs for another sentence head": (
        both(edited("model.json", "data.mixed_seq_datasets.24", {"wiki": "prepared/24"}), edited("model.json", "bert_model_config.sentence_head", "sop")),
        "prepared/24/", "was prepared with --objective nsp", "sentence_head is 'sop'", "set bert_model_config.sentence_head to 'nsp'",
    ),
    "pairs for a model of one segment": (
        edited("model.json", "bert_model_config.type_vocab_size", 1),
        "wiki_training_0.hdf5", "type_vocab_size is 1", "but the model JSON's type_vocab_size is 1", "set bert_model_config.type_vocab_size to 2",
    ),
    "a negative epoch": (words("--ckpt_to_save", "-1"), "--ckpt_to_save", "found '-1'", "expected a whole number of at least 0", "see --help"),
}  # fmt: skip

MODEL_JSON = {
    "no file": (removed("model.json"), "model.json", "no such file", "expected a model JSON (--cf)", "--cf"),
    "a folder": (words("--cf", "{root}/data"), "data", "folder", "expected a model JSON (--cf)", "--cf"),
    "a link to nothing": (both(link_to_nothing("lost.json"), words("--cf", "{root}/lost.json")), "lost.json", "no such", "expected a model JSON (--cf)", "--cf"),
    "empty": (replaced("model.json", ""), "model.json", "not valid JSON", "expected a model JSON (--cf), one JSON object", "fix it"),
    "cut short": (cut_short("model.json"), "model.json", "line ", "expected a model JSON (--cf), one JSON object", "fix it"),
    "not text": (replaced("model.json", b"\xff\xfe\x00"), "model.json", "UTF-8", "expected a model JSON (--cf)", "save it as UTF-8"),
    "a byte-order mark": (replaced("model.json", b"\xef\xbb\xbf[]"), "model.json", "list", "expected a model JSON (--cf), one JSON object {…}", "one JSON object"),
    "a list": (replaced("model.json", "[1]"), "model.json", "list", "expected a model JSON (--cf), one JSON object {…}", "one JSON object"),
    "a comment": (replaced("model.json", '{"name": "a" // mine\n}'), "model.json", "line 1", "expected a model JSON (--cf), one JSON object", "fix it"),
    "NaN": (replaced("model.json", '{"name": NaN}'), "model.json", "NaN is not a JSON number", "expected a model JSON (--cf), one JSON object", "fix it"),
    "weights of no dataset": (
        edited("model.json", "data.mixed_seq_weights", {"24": {"wiki": 1, "wikki": 2}}), "mixed_seq_weights", "'wikki'", "did you mean 'wiki'?", "did you mean 'wiki'?"
    ),
    "a dataset without weight": (
        edited("model.json", "data.mixed_seq_weights", {"24": {}}), "mixed_seq_weights", "no weight for wiki", "one for every dataset, or for none", "give one"
    ),
    "a weight of zero": (
        edited("model.json", "data.mixed_seq_weights", {"24": {"wiki": 0}}), "model.json", "found 0", "expected a number above 0", "above 0"
    ),
    "a folder twice": (
        edited("model.json", "data.mixed_seq_datasets.24.again", "data"), "data", "listed twice", "List it once", "weight"
    ),
    "a number that is too large": (replaced("model.json", '{"a": 1e999}'), "model.json", "1e999 is too large", "expected a model JSON (--cf), one JSON object", "fix it"),
    "a key twice": (replaced("model.json", '{"name": "a", "name": "b"}'), "model.json", "'name' occurs twice", "expected a model JSON (--cf), one JSON object", "fix it"),
    "nested without end": (replaced("model.json", '{"a":' * 100_000), "model.json", "not valid JSON", "expected a model JSON (--cf), one JSON object", "fix it"),
    "digits without end": (replaced("model.json", '{"a": ' + "1" * 10_000 + "}"), "model.json", "not valid JSON", "expected a model JSON (--cf), one JSON object", "fix it"),
    "a typo in the model": (
        edited("model.json", "bert_model_config.hiden_size", 32), "model.json", "unknown key 'hiden_size'", "did you mean 'hidden_size'?", "did you mean 'hidden_size'?"
    ),
    "a typo in the training": (
        edited("model.json", "mixed_seq_training.24.learning_rat", 1.0), "model.json", "learning_rat'", "did you mean 'learning_rate'?", "did you mean 'learning_rate'?"
    ),
    "a key without a similar name": (edited("model.json", "qqqqqq", 1), "model.json", "unknown key 'qqqqqq'", "expected one of those in docs/configuration.md", "remove it"),
    "a missing key": (without("model.json", "data"), "model.json", "'data' is missing", "as docs/configuration.md describes", "add it"),
    "a missing vocabulary": (without("model.json", "bert_model_config.vocab_size"), "model.json", "vocab_size is missing", "the number of tokens of the tokenizer", "give"),
    "a word for a number": (
        edited("model.json", "bert_model_config.hidden_size", "big"), "model.json", "hidden_size is 'big'", "expected a whole number from 1 up", "whole number from 1 up"
    ),
    "true for a number": (
        edited("model.json", "bert_model_config.num_hidden_layers", True), "model.json", "num_hidden_layers is True", "expected a whole number from 1 up", "whole number"
    ),
    "a model without layers": (
        edited("model.json", "bert_model_config.num_hidden_layers", 0), "model.json", "num_hidden_layers is 0", "expected a whole number from 1 up", "from 1 up"
    ),
    "a model larger than memory": (
        edited("model.json", "bert_model_config.hidden_size", 2**20), "model.json", "GiB", "but this machine has", "smaller"
    ),
    "heads that do not divide": (
        edited("model.json", "bert_model_config.num_attention_heads", 5), "model.json", "hidden_size is 32", "num_attention_heads among its divisors", "choose num_attention_heads"
    ),
    "an unknown activation": (
        edited("model.json", "bert_model_config.hidden_act", "gellu"), "model.json", "'gellu'", "expected one of gelu, gelu_tanh, relu, swish, silu, tanh", "did you mean 'gelu'?"
    ),
    "dropout of 1": (
        edited("model.json", "bert_model_config.hidden_dropout_prob", 1.0), "model.json", "hidden_dropout_prob is 1.0", "expected a number from 0 to below 1", "below 1"
    ),
    "a learning rate below zero": (
        edited("model.json", "mixed_seq_training.24.learning_rate", -1.0), "model.json", "found -1.0", "expected a number above 0", "above 0"
    ),
    "a warm-up that never ends": (
        edited("model.json", "mixed_seq_training.24.warmup_proportion", 1.5), "model.json", "found 1.5", "expected a number below 1", "below 1"
    ),
    "epochs as a word": (
        edited("model.json", "mixed_seq_training.24.num_epochs", "ten"), "model.json", "found 'ten'", "expected a whole number", "whole number"
    ),
    "a model that is a list": (edited("model.json", "bert_model_config", [1]), "model.json", "found [1]", "expected an object {…}", "an object"),
    "an empty name": (edited("model.json", "name", ""), "model.json", "found ''", "expected a string that is not empty", "not empty"),
    "positions too few": (
        edited("model.json", "bert_model_config.max_position_embeddings", 8), "model.json", "max_position_embeddings is 8", "but --max_seq_length is 24", "raise the former"
    ),
    "a window wider than any row": (
        both(edited("model.json", "bert_model_config.attention_window", 999), edited("model.json", "bert_model_config.global_attention_every", 2)),
        "bert_model_config", "attention_window is 999", "wider than any row (max_position_embeddings is", "choose a smaller window",
    ),
    "no data folder": (
        edited("model.json", "data.mixed_seq_datasets.24", {}), "model.json", "there is no data folder", "for rows of 24 tokens", "add one to data.mixed_seq_datasets"
    ),
}  # fmt: skip

DEEPSPEED_JSON = {
    "no file": (removed("deepspeed.json"), "deepspeed.json", "no such file", "expected a DeepSpeed JSON (--deepspeed_config)", "--deepspeed_config"),
    "cut short": (cut_short("deepspeed.json"), "deepspeed.json", "not valid JSON", "expected a DeepSpeed JSON (--deepspeed_config), one JSON", "fix it"),
    "a typo": (edited("deepspeed.json", "zero_optimisation", {}), "deepspeed.json", "unknown key", "did you mean 'zero_optimization'?", "did you mean 'zero_optimization'?"),
    "a key without a similar name": (edited("deepspeed.json", "qqqqqq", 1), "deepspeed.json", "unknown key 'qqqqqq'", "expected one of those in docs/configuration.md", "remove it"),
    "a typo in a block": (
        edited("deepspeed.json", "zero_optimization.stge", 1), "deepspeed.json", "zero_optimization.stge", "did you mean 'stage'?", "did you mean 'stage'?"
    ),
    "a key without a similar name in a block": (
        edited("deepspeed.json", "zero_optimization.qqqqqq", 1), "deepspeed.json", "zero_optimization.qqqqqq", "expected one of those in docs/configuration.md", "remove it"
    ),
    "stage 4": (edited("deepspeed.json", "zero_optimization.stage", 4), "deepspeed.json", "found 4", "expected 0, 1, 2 or 3", "0, 1, 2 or 3"),
    "a block that is a number": (edited("deepspeed.json", "fp16", 1), "deepspeed.json", "found 1", "expected an object {…}", "an object"),
    "a monitor that is a word": (edited("deepspeed.json", "tensorboard", "on"), "deepspeed.json", "found 'on'", "expected an object {…}", "an object"),
    "wandb as a word": (edited("deepspeed.json", "wandb", True), "deepspeed.json", "found True", "expected an object {…}", "an object"),
    "auto": (edited("deepspeed.json", "train_batch_size", "auto"), "train_batch_size'", '"auto"', "nothing here fills in", "give a value"),
    "a scheduler": (edited("deepspeed.json", "scheduler", {"type": "WarmupLR"}), "deepspeed.json", "'scheduler'", "the learning rate comes from the model JSON", "--lr_schedule"),
    "no batch size": (without("deepspeed.json", "train_batch_size"), "deepspeed.json", "neither train_batch_size nor", "expected at least one of them", "give the rows"),
    "no rows per step": (edited("deepspeed.json", "train_batch_size", 0), "deepspeed.json", "found 0", "expected a number of at least 1", "at least 1"),
    "batch numbers that disagree": (
        both(edited("deepspeed.json", "train_micro_batch_size_per_gpu", 3), edited("deepspeed.json", "gradient_accumulation_steps", 2)),
        "deepspeed.json", "train_batch_size 8 is not micro batch 3", "micro batch 3 × accumulation 2 × 1 rank;", "change one",
    ),
    "two half precisions": (
        both(edited("deepspeed.json", "fp16.enabled", True), edited("deepspeed.json", "bf16.enabled", True)),
        "deepspeed.json", "both fp16 and bf16", "expected at most one of them", "disable the other",
    ),
    "clipping below zero": (edited("deepspeed.json", "gradient_clipping", -1), "deepspeed.json", "found -1", "expected a number of at least 0", "at least 0"),
    "an unknown optimizer": (
        edited("deepspeed.json", "optimizer.type", "AdamX"), "deepspeed.json", "found 'AdamX'", "expected one of adam, adamw, lamb", "did you mean 'adam"
    ),
    "an optimizer without a type": (without("deepspeed.json", "optimizer.type"), "deepspeed.json", "'optimizer.type' is missing", "as docs/configuration.md describes", "add it"),
    "a typo in the optimizer": (
        edited("deepspeed.json", "optimizer.params.beta", [0.9, 0.9]), "deepspeed.json", "optimizer.params.beta", "did you mean 'betas'?", "did you mean 'betas'?"
    ),
    "betas as a word": (
        edited("deepspeed.json", "optimizer.params.betas", "0.9"), "deepspeed.json", "found '0.9'", "expected two numbers from 0 to below 1, such as [0.9, 0.999]", "two numbers from 0 to below 1"
    ),
    "an epsilon as a word": (edited("deepspeed.json", "optimizer.params.eps", "small"), "deepspeed.json", "found 'small'", "expected a number", "a number"),
    "Lamb with ZeRO": (
        both(edited("deepspeed.json", "optimizer.type", "Lamb"), edited("deepspeed.json", "zero_optimization.stage", 2)),
        "deepspeed.json", "Lamb cannot be used with ZeRO stage 2", "need the norm of each whole parameter", "use AdamW",
    ),
    "Muon with ZeRO 3": (
        both(edited("deepspeed.json", "optimizer.type", "Muon"), edited("deepspeed.json", "zero_optimization.stage", 3)),
        "deepspeed.json", "Muon with ZeRO stage 3", "needs whole gradients", "reduce_scatter to false",
    ),
    "checkpoints on each machine": (
        edited("deepspeed.json", "checkpoint.use_node_local_storage", True), "deepspeed.json", "use_node_local_storage", "only if one folder holds the files of all ranks", "remove it"
    ),
    "parameters aligned": (
        edited("deepspeed.json", "zero_optimization", {"stage": 1, "parameter_alignment": True}),
        "deepspeed.json", "parameter_alignment", "leaves gaps between parameters", "remove it",
    ),
    "fp32 sums of bf16 gradients at stage 1": (
        both(edited("deepspeed.json", "zero_optimization.stage", 1), edited("deepspeed.json", "bf16.enabled", True),
             edited("deepspeed.json", "data_types.grad_accum_dtype", "fp32")),
        "deepspeed.json", "data_types.grad_accum_dtype", "use ZeRO stage 2", "stage 2",
    ),
    "an unknown sparse mode": (
        both(edited("deepspeed.json", "sparse_attention.mode", "fixxed"), words("--deepspeed_sparse_attention")),
        "sparse_attention", "'fixxed'", "expected one of dense, fixed, variable, bigbird", "did you mean 'fixed'?",
    ),
    "a sparse mode that is a list": (
        both(edited("deepspeed.json", "sparse_attention.mode", []), words("--deepspeed_sparse_attention")),
        "sparse_attention", "mode is []", "expected one of dense, fixed, variable, bigbird", "expected one of",
    ),
    "a sparse key that no mode has": (
        both(edited("deepspeed.json", "sparse_attention", {"mode": "fixed", "num_random_block": 1}), words("--deepspeed_sparse_attention")),
        "deepspeed.json", "unknown key 'num_random_block'", "did you mean 'num_random_blocks'?", "did you mean 'num_random_blocks'?",
    ),
    "a sparse key of another mode with no value for any": (
        both(edited("deepspeed.json", "sparse_attention", {"mode": "fixed", "num_random_blocks": "few"}), words("--deepspeed_sparse_attention")),
        "deepspeed.json", "num_random_blocks is 'few'", "expected a whole number from 0 up", "expected a whole number from 0 up",
    ),
    "a layer drop beyond one": (
        edited("deepspeed.json", "progressive_layer_drop.theta", 2.0), "deepspeed.json", "found 2.0", "expected a number of at most 1", "at most 1"
    ),
    "a typo in a monitor": (
        edited("deepspeed.json", "csv_monitor.output_pth", "csv"), "deepspeed.json", "'csv_monitor.output_pth'", "did you mean 'output_path'?", "did you mean 'output_path'?"
    ),
    "a typo in wandb": (edited("deepspeed.json", "wandb.projct", "x"), "deepspeed.json", "'wandb.projct'", "did you mean 'project'?", "did you mean 'project'?"),
    "a typo in comet": (edited("deepspeed.json", "comet.workspac", "x"), "deepspeed.json", "'comet.workspac'", "did you mean 'workspace'?", "did you mean 'workspace'?"),
    "a typo in tensorboard": (
        edited("deepspeed.json", "tensorboard.job_nam", "x"), "deepspeed.json", "'tensorboard.job_nam'", "did you mean 'job_name'?", "did you mean 'job_name'?"
    ),
    "a typo in an offload block": (
        edited("deepspeed.json", "zero_optimization.offload_optimizer.devce", "cpu"), "deepspeed.json", "offload_optimizer.devce'", "did you mean 'device'?", "did you mean 'device'?"
    ),
    "a sum type that stage 0 does not support": (
        both(edited("deepspeed.json", "bf16.enabled", True), edited("deepspeed.json", "data_types.grad_accum_dtype", "fp32")),
        "deepspeed.json", "grad_accum_dtype is 'fp32'", "sums gradients only in bf16", "stage to 1",
    ),
    "an unknown sum type": (
        both(edited("deepspeed.json", "zero_optimization.stage", 2), edited("deepspeed.json", "data_types.grad_accum_dtype", "fp99")),
        "deepspeed.json", "grad_accum_dtype is 'fp99'", "expected one of fp32, fp16, bf16", "remove the key",
    ),
    "wandb without its package": (
        edited("deepspeed.json", "wandb.enabled", True), "deepspeed.json", "package is missing", "but its package is missing", "pip install wandb"
    ),
}  # fmt: skip

TOKENIZER = {
    "a tokenizer without a mask token": (
        both(replaced("t.json", WITHOUT_MASK), edited("model.json", "bert_token_file", "t.json")), "t.json", "no mask token", "expected [MASK] or <mask>", "add_special_tokens",
    ),
    "no such tokenizer": (edited("model.json", "bert_token_file", "lost"), "lost", "no such tokenizer", "a vocab.txt, a tokenizer.json or a folder with one", "give a vocab.txt"),
    "an empty folder": (removed("tokenizer/*"), "tokenizer", "neither tokenizer.json nor vocab.txt", "a folder with one of them", "give a folder"),
    "a broken tokenizer.json": (cut_short("tokenizer/tokenizer.json"), "tokenizer.json", "is not valid JSON", "expected an object", "copy it again"),
    "another library's tokenizer.json": (
        replaced("tokenizer/tokenizer.json", '{"a": 1}'), "tokenizer.json", "is not a tokenizer", "tokenizer of the tokenizers library", "save it again"
    ),
    "a vocabulary without specials": (
        both(replaced("v.txt", "a\nb\n"), edited("model.json", "bert_token_file", "v.txt")), "v.txt", "lacks [PAD]", "has all of [PAD], [UNK], [CLS], [SEP], [MASK]", "has all of"
    ),
    "a vocabulary with a token twice": (
        both(replaced("v.txt", "[PAD]\n[PAD]\n"), edited("model.json", "bert_token_file", "v.txt")), "v.txt", "has 1 repeated token", "one token per line, each once", "each once"
    ),
    "a vocabulary that is not text": (
        both(replaced("v.txt", b"\xff\xfe"), edited("model.json", "bert_token_file", "v.txt")), "v.txt", "not a vocabulary in UTF-8", "a vocab.txt with one token per line", "give a vocab.txt"
    ),
    "an empty vocabulary": (
        both(replaced("v.txt", ""), edited("model.json", "bert_token_file", "v.txt")), "v.txt", "lacks [PAD]", "has all of [PAD], [UNK], [CLS], [SEP], [MASK]", "has all of"
    ),
    "a broken tokenizer_config.json": (
        replaced("tokenizer/tokenizer_config.json", "{"), "tokenizer_config.json", "is not valid JSON", "expected an object", "copy it again"
    ),
    "a tokenizer with fewer tokens than the data": (
        both(replaced("v.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n"), edited("model.json", "bert_token_file", "v.txt")),
        "wiki_training_", "outside 0…5", "expected the tokenizer that made the shard", "tokenizer",
    ),
}  # fmt: skip

CASES = [*table(TRAIN, {f"{kind}, {name}": row for kind, rows in (
    ("flags", FLAGS), ("model JSON", MODEL_JSON), ("DeepSpeed JSON", DEEPSPEED_JSON), ("tokenizer", TOKENIZER)
) for name, row in rows.items()})]  # fmt: skip
