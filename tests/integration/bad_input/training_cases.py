"""Bad input for the launcher: flags, the two JSON files, the tokenizer."""

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

FLAGS = {
    "no flags": (only(), "--config-file/--cf", "required", "see --help"),
    "an export into a folder of other files": (words("--export_dir", "{root}/data"), "--export_dir", "is not empty", "a new folder"),
    "an unknown flag": (words("--max_step", "3"), "--max_step'", "unknown flag", "did you mean '--max_steps'?"),
    "an unknown flag like no other": (words("--zzzzzz"), "--zzzzzz", "unknown flag", "see --help"),
    "a loose word": (words("faster"), "'faster'", "unexpected word", "remove it"),
    "a flag without its value": (words("--seed"), "--seed", "expected one argument", "see --help"),
    "a word for a number": (words("--max_steps", "many"), "--max_steps", "found 'many'", "whole number of at least 1"),
    "no steps": (words("--max_steps", "0"), "--max_steps", "found '0'", "whole number of at least 1"),
    "a seed that is no number": (words("--seed", "abc"), "--seed", "found 'abc'", "whole number"),
    "a seed below zero": (words("--seed", "-4"), "--seed", "-4", "from 0"),
    "a seed beyond 64 bits": (words("--seed", str(2**70)), "--seed", str(2**70), "from 0"),
    "a choice that is none": (words("--lr_schedule", "LF"), "--lr_schedule", "'LF'", "choose from"),
    "a negative rate offset": (words("--lr_offset", "-0.1"), "--lr_offset", "-0.1", "not negative"),
    "a negative rate offset with an exponent": (words("--lr_offset", "-1e-3"), "--lr_offset", "-0.001", "not negative"),
    "a prefix that is no folder": (
        words("--data_path_prefix", "{root}/lost"), "--data_path_prefix {root}/lost", "no such folder", "that the folders in the model JSON are below"
    ),
    "a validation prefix that is no folder": (
        words("--validation_data_path_prefix", "{root}/lost"), "--validation_data_path_prefix {root}/lost", "no such folder", "are below"
    ),
    "a rate offset that is no number": (words("--lr_offset", "nan"), "--lr_offset", "nan", "finite"),
    "a time that is none": (words("--time_budget", "soon"), "--time_budget", "soon", "45m"),
    "no time": (words("--time_budget", "0s"), "--time_budget", "0s", "90s"),
    "a time beyond numbers": (words("--time_budget", "9" * 400 + "s"), "--time_budget", "999", "45m"),
    "masking all": (words("--dynamic_masking", "--masking_rate", "1.5"), "--masking_rate", "1.5", "0.15"),
    "masking flags alone": (words("--masking_rate", "0.3"), "--masking_rate", "masks drawn anew", "--dynamic_masking"),
    "a batch schedule without sense": (words("--batch_schedule", "fast"), "--batch_schedule", "'fast'", "0:0.30,100M"),
    "a batch schedule that does not divide": (words("--batch_schedule", "0:8,1k:13"), "--batch_schedule", "13 rows", "multiples"),
    "buckets": (words("--refresh_bucket_size", "4"), "--refresh_bucket_size", "4", "drop the flag"),
    "a fused layer": (words("--deepspeed_transformer_kernel"), "--deepspeed_transformer_kernel", "CUDA only", "drop the"),
    "a fused layer for what it does not compute": (
        both(edited("model.json", "bert_model_config.position_embedding_type", "relative_key"), words("--deepspeed_transformer_kernel")),
        "--deepspeed_transformer_kernel", "does not compute position_embedding_type 'relative_key'", "change the model",
    ),
    "a mode without its layer": (words("--stochastic_mode"), "--stochastic_mode", "mode of", "pass both or neither"),
    "sparse attention without its block": (words("--deepspeed_sparse_attention"), "deepspeed.json", "sparse_attention", "add"),
    "weights from nowhere": (words("--finetune"), "--finetune", "weights only", "--load_training_checkpoint or --use_pretrain"),
    "weights from two places": (
        words("--use_pretrain", "{root}/hf", "--load_cp", "{root}/out/saved_models/tiny"), "--use_pretrain", "both", "pass one"
    ),
    "an id without a folder": (words("--load_cp_id", "step_1"), "--load_checkpoint_id", "needs", "--load_training_checkpoint"),
    "a job name that leaves the folder": (words("--job_name", "../up"), "--job_name", "'../up'", "plain name"),
    "a job name of nothing": (words("--job_name", "."), "--job_name", "'.'", "plain name"),
    "a job name that no disk takes": (words("--job_name", "x" * 300), "--job_name", "x" * 20, "shorter"),
    "a length that the JSON has not": (words("--max_seq_length", "16"), "model.json", "no entry for --max_seq_length 16", 'add "16"'),
    "fewer predictions than the shards have": (
        words("--max_pred", "2"), "--max_predictions_per_seq", "up to 4 predictions", "pass --max_predictions_per_seq 4"
    ),
    "a cased tokenizer and --do_lower_case": (
        both(replaced("cased.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nA\n"), edited("model.json", "bert_token_file", "cased.txt"),
             words("--do_lower_case")),
        "--do_lower_case", "does not lower-case", "drop the flag",
    ),
    "pairs for another sentence head": (
        both(edited("model.json", "data.mixed_seq_datasets.24", {"wiki": "prepared/24"}), edited("model.json", "bert_model_config.sentence_head", "sop")),
        "prepared/24/", "was prepared with --objective nsp", "set bert_model_config.sentence_head to 'nsp'",
    ),
    "pairs for a model of one segment": (
        edited("model.json", "bert_model_config.type_vocab_size", 1),
        "wiki_training_0.hdf5", "type_vocab_size is 1", "set bert_model_config.type_vocab_size to 2",
    ),
    "an epoch before the first": (words("--ckpt_to_save", "-1"), "--ckpt_to_save", "found '-1'", "from 0 up"),
}  # fmt: skip

MODEL_JSON = {
    "no file": (removed("model.json"), "model.json", "no such file", "--cf"),
    "a folder": (words("--cf", "{root}/data"), "data", "folder", "--cf"),
    "a link to nothing": (both(link_to_nothing("lost.json"), words("--cf", "{root}/lost.json")), "lost.json", "no such", "--cf"),
    "empty": (replaced("model.json", ""), "model.json", "no valid JSON", "mend it"),
    "cut short": (cut_short("model.json"), "model.json", "line ", "mend it"),
    "no text": (replaced("model.json", b"\xff\xfe\x00"), "model.json", "UTF-8", "a model JSON"),
    "a byte-order mark": (replaced("model.json", b"\xef\xbb\xbf[]"), "model.json", "list", "one JSON object"),
    "a list": (replaced("model.json", "[1]"), "model.json", "list", "one JSON object"),
    "a comment": (replaced("model.json", '{"name": "a" // mine\n}'), "model.json", "line 1", "mend it"),
    "NaN": (replaced("model.json", '{"name": NaN}'), "model.json", "NaN is not a JSON number", "mend it"),
    "weights of no dataset": (
        edited("model.json", "data.mixed_seq_weights", {"24": {"wiki": 1, "wikki": 2}}), "mixed_seq_weights", "'wikki'", "did you mean 'wiki'?"
    ),
    "a dataset without weight": (
        edited("model.json", "data.mixed_seq_weights", {"24": {}}), "mixed_seq_weights", "no weight for wiki", "give one"
    ),
    "a weight of nothing": (
        edited("model.json", "data.mixed_seq_weights", {"24": {"wiki": 0}}), "model.json", "found 0", "greater than 0"
    ),
    "a folder twice": (
        edited("model.json", "data.mixed_seq_datasets.24.again", "data"), "data", "named twice", "weight"
    ),
    "a number beyond numbers": (replaced("model.json", '{"a": 1e999}'), "model.json", "1e999 is too large", "mend it"),
    "a key twice": (replaced("model.json", '{"name": "a", "name": "b"}'), "model.json", "'name' stands twice", "mend it"),
    "nested without end": (replaced("model.json", '{"a":' * 100_000), "model.json", "no valid JSON", "mend it"),
    "digits without end": (replaced("model.json", '{"a": ' + "1" * 10_000 + "}"), "model.json", "no valid JSON", "mend it"),
    "a typo in the model": (
        edited("model.json", "bert_model_config.hiden_size", 32), "model.json", "unknown key 'hiden_size'", "did you mean 'hidden_size'?"
    ),
    "a typo in the training": (
        edited("model.json", "mixed_seq_training.24.learning_rat", 1.0), "model.json", "learning_rat'", "did you mean 'learning_rate'?"
    ),
    "a key like no other": (edited("model.json", "qqqqqq", 1), "model.json", "unknown key 'qqqqqq'", "remove it"),
    "a missing key": (without("model.json", "data"), "model.json", "'data' is missing", "add it"),
    "a missing vocabulary": (without("model.json", "bert_model_config.vocab_size"), "model.json", "vocab_size is missing", "give"),
    "a word for a number": (
        edited("model.json", "bert_model_config.hidden_size", "big"), "model.json", "hidden_size is 'big'", "whole number from 1 up"
    ),
    "true for a number": (
        edited("model.json", "bert_model_config.num_hidden_layers", True), "model.json", "num_hidden_layers is True", "whole number"
    ),
    "a model without layers": (
        edited("model.json", "bert_model_config.num_hidden_layers", 0), "model.json", "num_hidden_layers is 0", "from 1 up"
    ),
    "a model that no memory holds": (
        edited("model.json", "bert_model_config.hidden_size", 2**20), "model.json", "GiB", "smaller"
    ),
    "heads that do not divide": (
        edited("model.json", "bert_model_config.num_attention_heads", 5), "model.json", "hidden_size is 32", "divisors"
    ),
    "an activation that is none": (
        edited("model.json", "bert_model_config.hidden_act", "gellu"), "model.json", "'gellu'", "did you mean 'gelu'?"
    ),
    "dropping everything": (
        edited("model.json", "bert_model_config.hidden_dropout_prob", 1.0), "model.json", "hidden_dropout_prob is 1.0", "below 1"
    ),
    "a learning rate below zero": (
        edited("model.json", "mixed_seq_training.24.learning_rate", -1.0), "model.json", "found -1.0", "greater than 0"
    ),
    "a warm-up that never ends": (
        edited("model.json", "mixed_seq_training.24.warmup_proportion", 1.5), "model.json", "found 1.5", "less than 1"
    ),
    "epochs as a word": (
        edited("model.json", "mixed_seq_training.24.num_epochs", "ten"), "model.json", "found 'ten'", "valid integer"
    ),
    "a model that is a list": (edited("model.json", "bert_model_config", [1]), "model.json", "found [1]", "valid dictionary"),
    "an empty name": (edited("model.json", "name", ""), "model.json", "found ''", "at least 1 character"),
    "positions too few": (
        edited("model.json", "bert_model_config.max_position_embeddings", 8), "model.json", "max_position_embeddings is 8", "raise the one"
    ),
    "no data folder named": (
        edited("model.json", "data.mixed_seq_datasets.24", {}), "model.json", "no data folder", "data.mixed_seq_datasets"
    ),
}  # fmt: skip

DEEPSPEED_JSON = {
    "no file": (removed("deepspeed.json"), "deepspeed.json", "no such file", "--deepspeed_config"),
    "cut short": (cut_short("deepspeed.json"), "deepspeed.json", "no valid JSON", "mend it"),
    "a typo": (edited("deepspeed.json", "zero_optimisation", {}), "deepspeed.json", "unknown key", "did you mean 'zero_optimization'?"),
    "a key like no other": (edited("deepspeed.json", "qqqqqq", 1), "deepspeed.json", "unknown key 'qqqqqq'", "remove it"),
    "a typo in a block": (
        edited("deepspeed.json", "zero_optimization.stge", 1), "deepspeed.json", "zero_optimization.stge", "did you mean 'stage'?"
    ),
    "a key like no other in a block": (
        edited("deepspeed.json", "zero_optimization.qqqqqq", 1), "deepspeed.json", "zero_optimization.qqqqqq", "remove it"
    ),
    "stage 4": (edited("deepspeed.json", "zero_optimization.stage", 4), "deepspeed.json", "found 4", "0, 1, 2 or 3"),
    "a block that is a number": (edited("deepspeed.json", "fp16", 1), "deepspeed.json", "found 1", "an object"),
    "a monitor that is a word": (edited("deepspeed.json", "tensorboard", "on"), "deepspeed.json", "found 'on'", "an object"),
    "wandb as a word": (edited("deepspeed.json", "wandb", True), "deepspeed.json", "found True", "an object"),
    "auto": (edited("deepspeed.json", "train_batch_size", "auto"), "deepspeed.json", '"auto"', "give a value"),
    "a scheduler": (edited("deepspeed.json", "scheduler", {"type": "WarmupLR"}), "deepspeed.json", "'scheduler'", "--lr_schedule"),
    "no batch size": (without("deepspeed.json", "train_batch_size"), "deepspeed.json", "train_batch_size", "give"),
    "no rows a step": (edited("deepspeed.json", "train_batch_size", 0), "deepspeed.json", "found 0", "at least 1"),
    "batch numbers that disagree": (
        both(edited("deepspeed.json", "train_micro_batch_size_per_gpu", 3), edited("deepspeed.json", "gradient_accumulation_steps", 2)),
        "deepspeed.json", "train_batch_size 8 is not micro batch 3", "change one",
    ),
    "two half precisions": (
        both(edited("deepspeed.json", "fp16.enabled", True), edited("deepspeed.json", "bf16.enabled", True)),
        "deepspeed.json", "both fp16 and bf16", "enable one",
    ),
    "clipping below zero": (edited("deepspeed.json", "gradient_clipping", -1), "deepspeed.json", "found -1", "at least 0"),
    "an optimizer that is none": (
        edited("deepspeed.json", "optimizer.type", "AdamX"), "deepspeed.json", "'AdamX' is none of", "did you mean 'adam"
    ),
    "an optimizer without a type": (without("deepspeed.json", "optimizer.type"), "deepspeed.json", "found None", "must name"),
    "a typo in the optimizer": (
        edited("deepspeed.json", "optimizer.params.beta", [0.9, 0.9]), "deepspeed.json", "optimizer.params.beta", "did you mean 'betas'?"
    ),
    "betas as a word": (
        edited("deepspeed.json", "optimizer.params.betas", "0.9"), "deepspeed.json", "found '0.9'", "two numbers from 0 to below 1"
    ),
    "an epsilon as a word": (edited("deepspeed.json", "optimizer.params.eps", "small"), "deepspeed.json", "found 'small'", "a number"),
    "Lamb with ZeRO": (
        both(edited("deepspeed.json", "optimizer.type", "Lamb"), edited("deepspeed.json", "zero_optimization.stage", 2)),
        "deepspeed.json", "Lamb with ZeRO stage 2", "use AdamW",
    ),
    "Muon with ZeRO 3": (
        both(edited("deepspeed.json", "optimizer.type", "Muon"), edited("deepspeed.json", "zero_optimization.stage", 3)),
        "deepspeed.json", "Muon with ZeRO stage 3", "reduce_scatter to false",
    ),
    "checkpoints on each machine": (
        edited("deepspeed.json", "checkpoint.use_node_local_storage", True), "deepspeed.json", "use_node_local_storage", "remove it"
    ),
    "parameters aligned": (
        edited("deepspeed.json", "zero_optimization", {"stage": 1, "parameter_alignment": True}),
        "deepspeed.json", "parameter_alignment", "remove it",
    ),
    "fp32 sums of bf16 gradients at stage 1": (
        both(edited("deepspeed.json", "zero_optimization.stage", 1), edited("deepspeed.json", "bf16.enabled", True),
             edited("deepspeed.json", "data_types.grad_accum_dtype", "fp32")),
        "deepspeed.json", "data_types.grad_accum_dtype", "stage 2",
    ),
    "a sparse mode that is none": (
        both(edited("deepspeed.json", "sparse_attention.mode", "fixxed"), words("--deepspeed_sparse_attention")),
        "sparse_attention", "'fixxed'", "did you mean 'fixed'?",
    ),
    "a sparse mode that is a list": (
        both(edited("deepspeed.json", "sparse_attention.mode", []), words("--deepspeed_sparse_attention")),
        "sparse_attention", "mode is []", "expected one of",
    ),
    "a sparse key that no mode has": (
        both(edited("deepspeed.json", "sparse_attention", {"mode": "fixed", "num_random_block": 1}), words("--deepspeed_sparse_attention")),
        "deepspeed.json", "unknown key 'num_random_block'", "did you mean 'num_random_blocks'?",
    ),
    "a sparse key of another mode with no value for any": (
        both(edited("deepspeed.json", "sparse_attention", {"mode": "fixed", "num_random_blocks": "few"}), words("--deepspeed_sparse_attention")),
        "deepspeed.json", "num_random_blocks is 'few'", "expected a whole number from 0 up",
    ),
    "a layer drop beyond one": (
        edited("deepspeed.json", "progressive_layer_drop.theta", 2.0), "deepspeed.json", "found 2.0", "less than or equal to 1"
    ),
    "a typo in a monitor": (
        edited("deepspeed.json", "csv_monitor.output_pth", "csv"), "deepspeed.json", "'csv_monitor.output_pth'", "did you mean 'output_path'?"
    ),
    "a typo in wandb": (edited("deepspeed.json", "wandb.projct", "x"), "deepspeed.json", "'wandb.projct'", "did you mean 'project'?"),
    "a typo in comet": (edited("deepspeed.json", "comet.workspac", "x"), "deepspeed.json", "'comet.workspac'", "did you mean 'workspace'?"),
    "a typo in tensorboard": (
        edited("deepspeed.json", "tensorboard.job_nam", "x"), "deepspeed.json", "'tensorboard.job_nam'", "did you mean 'job_name'?"
    ),
    "a typo in an offload block": (
        edited("deepspeed.json", "zero_optimization.offload_optimizer.devce", "cpu"), "deepspeed.json", "offload_optimizer.devce'", "did you mean 'device'?"
    ),
    "sums of gradients that stage 0 cannot have": (
        both(edited("deepspeed.json", "bf16.enabled", True), edited("deepspeed.json", "data_types.grad_accum_dtype", "fp32")),
        "deepspeed.json", "grad_accum_dtype is 'fp32'", "stage to 1",
    ),
    "sums of gradients in a type that is none": (
        both(edited("deepspeed.json", "zero_optimization.stage", 2), edited("deepspeed.json", "data_types.grad_accum_dtype", "fp99")),
        "deepspeed.json", "grad_accum_dtype is 'fp99'", "one of fp32, fp16, bf16",
    ),
    "wandb without its package": (
        edited("deepspeed.json", "wandb.enabled", True), "deepspeed.json", "package is missing", "pip install wandb"
    ),
}  # fmt: skip

TOKENIZER = {
    "no such tokenizer": (edited("model.json", "bert_token_file", "lost"), "lost", "no such tokenizer", "give a vocab.txt"),
    "an empty folder": (removed("tokenizer/*"), "tokenizer", "neither tokenizer.json nor vocab.txt", "give a folder"),
    "a broken tokenizer.json": (cut_short("tokenizer/tokenizer.json"), "tokenizer.json", "is no JSON", "copy it again"),
    "another library's tokenizer.json": (
        replaced("tokenizer/tokenizer.json", '{"a": 1}'), "tokenizer.json", "is no tokenizer", "save it again"
    ),
    "a vocabulary without specials": (
        both(replaced("v.txt", "a\nb\n"), edited("model.json", "bert_token_file", "v.txt")), "v.txt", "lacks [PAD]", "has all of"
    ),
    "a vocabulary with a token twice": (
        both(replaced("v.txt", "[PAD]\n[PAD]\n"), edited("model.json", "bert_token_file", "v.txt")), "v.txt", "more than once", "each once"
    ),
    "a vocabulary that is no text": (
        both(replaced("v.txt", b"\xff\xfe"), edited("model.json", "bert_token_file", "v.txt")), "v.txt", "no vocabulary in UTF-8", "one token a line"
    ),
    "an empty vocabulary": (
        both(replaced("v.txt", ""), edited("model.json", "bert_token_file", "v.txt")), "v.txt", "lacks [PAD]", "has all of"
    ),
    "a broken tokenizer_config.json": (
        replaced("tokenizer/tokenizer_config.json", "{"), "tokenizer_config.json", "is no JSON", "copy it again"
    ),
    "a tokenizer with fewer tokens than the data": (
        both(replaced("v.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n"), edited("model.json", "bert_token_file", "v.txt")),
        "wiki_training_", "outside 0…5", "tokenizer",
    ),
}  # fmt: skip

CASES = [*table(TRAIN, {f"{kind}, {name}": row for kind, rows in (
    ("flags", FLAGS), ("model JSON", MODEL_JSON), ("DeepSpeed JSON", DEEPSPEED_JSON), ("tokenizer", TOKENIZER)
) for name, row in rows.items()})]  # fmt: skip
