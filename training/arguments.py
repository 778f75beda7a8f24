"""The launcher's command line: every flag, its default and its meaning."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from common.help import Parser, positive_int, seed_number, whole_number
from data.masking import UNITS
from training.schedule import SCHEDULES

PRECISIONS = ("auto", "fp32", "fp16", "bf16")


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above zero, but is {text}")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="deepspeed_train.py",
        description="Pretrain a BERT with DeepSpeed on sharded HDF5 data. Start it with `deepspeed` for many ranks or "
        "with `python` for one. The same command, run again, goes on where it was.",
    )
    _add_required(parser)
    _add_data(parser)
    _add_training(parser)
    _add_checkpoints(parser)
    _add_faults(parser)
    _add_model(parser)
    _add_launcher(parser)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return build_parser().parse_args(argv)


def _add_required(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("required")
    group.add_argument(
        "--config-file", "--cf", dest="config_file", type=Path, required=True, metavar="FILE", help="the model JSON"
    )
    group.add_argument(
        "--output_dir", type=Path, required=True, metavar="DIR", help="where checkpoints and logs are written"
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--max_seq_length", type=positive_int, default=512, metavar="S", help="tokens in a row (default: %(default)s)"
    )
    group.add_argument(
        "--max_predictions_per_seq",
        "--max_pred",
        type=positive_int,
        default=80,
        metavar="P",
        help="the most masked tokens in a row (default: %(default)s)",
    )
    group.add_argument(
        "--data_path_prefix",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder that the model JSON's dataset folders are below (default: the current folder)",
    )
    group.add_argument(
        "--validation_data_path_prefix",
        type=Path,
        metavar="DIR",
        help="the same for the validation data (default: --data_path_prefix)",
    )
    group.add_argument(
        "--use_nvidia_dataset", action="store_true", help="HDF5 shards; the only kind there is, so accepted and implied"
    )
    group.add_argument(
        "--do_lower_case",
        action="store_true",
        default=None,
        help="insist on a lower-casing tokenizer; refused when the tokenizer found does not lower-case",
    )
    group.add_argument(
        "--dynamic_masking", action="store_true", help="draw new masks every epoch instead of using the shards' own"
    )
    group.add_argument(
        "--masking_rate",
        default="0.15",
        metavar="RATE",
        help="share of tokens that --dynamic_masking predicts, or a schedule over tokens seen: 0:0.30,100M:0.15",
    )
    group.add_argument(
        "--masking_unit",
        choices=UNITS,
        default="token",
        help="what --dynamic_masking masks: single tokens, whole words, or spans of words",
    )
    group.add_argument(
        "--refresh_bucket_size",
        type=positive_int,
        default=1,
        metavar="N",
        help="only 1 is accepted: datasets are mixed row by row, so there are no buckets to repeat",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--seed", type=seed_number, default=42, metavar="N", help="seed of all that is random (default: 42)"
    )
    group.add_argument(
        "--lr_schedule", default="LE", choices=sorted(SCHEDULES), help="shape of the learning rate (default: LE)"
    )
    group.add_argument(
        "--lr_offset", type=float, default=0.0, metavar="X", help="added to the rate at every step (default: 0.0)"
    )
    group.add_argument(
        "--rewarmup", action="store_true", help="count the schedule's steps from the checkpoint that the run began with"
    )
    group.add_argument("--max_steps", type=positive_int, metavar="N", help="end after N optimizer steps of this run")
    group.add_argument(
        "--batch_schedule",
        metavar="POINTS",
        help="rows a step over tokens seen: 0:256,1G:4096; replaces the DeepSpeed JSON's train_batch_size",
    )
    group.add_argument(
        "--length_schedule",
        metavar="POINTS",
        help="tokens in a row over tokens seen: 0:128,900M:512; rises to --max_seq_length, with as many more of the "
        "shorter rows a step as keep its tokens",
    )
    group.add_argument(
        "--time_budget",
        metavar="TIME",
        help="end after this much time (90s, 45m, 24h, 1d12h), restarts included; the schedule follows the clock "
        "instead of the steps",
    )
    group.add_argument(
        "--max_steps_per_epoch", type=positive_int, metavar="N", help="go on to the next epoch after N steps in one"
    )
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="auto: what the DeepSpeed JSON asks for where this machine can do it, else fp32 with a warning; any other "
        "value overrides the JSON",
    )
    group.add_argument(
        "--print_steps", type=positive_int, default=100, metavar="N", help="steps between two reports (default: 100)"
    )
    group.add_argument(
        "--validate_every_steps",
        type=positive_int,
        metavar="N",
        help="steps between two validations (default: only at the end)",
    )
    group.add_argument(
        "--log_histograms",
        action="store_true",
        help="at every validation, histograms of all weights to TensorBoard (not with ZeRO stage 3)",
    )
    group.add_argument(
        "--dry_run",
        action="store_true",
        help="build everything, take a few steps on one batch, say what the run would cost, and write nothing",
    )
    group.add_argument(
        "--job_name", metavar="NAME", help="names the run's folders below --output_dir (default: the model JSON's name)"
    )


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--load_training_checkpoint",
        "--load_cp",
        type=Path,
        metavar="DIR",
        help="begin this run from a checkpoint of another one (a saved_models/<job_name> folder)",
    )
    group.add_argument(
        "--load_checkpoint_id", "--load_cp_id", metavar="TAG", help="which one in that folder (default: its newest)"
    )
    group.add_argument(
        "--use_pretrain",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="begin from the weights of a Hugging Face folder (without FOLDER: the model JSON's bert_model_file)",
    )
    group.add_argument(
        "--save_every_steps", type=positive_int, metavar="N", help="steps between two checkpoints within an epoch"
    )
    group.add_argument(
        "--save_every_minutes", type=positive_float, metavar="N", help="minutes between two checkpoints, by the clock"
    )
    group.add_argument(
        "--ckpt_to_save",
        type=whole_number,
        nargs="+",
        metavar="EPOCH",
        help="save only at the end of these epochs and at the end of the run (default: every epoch)",
    )
    group.add_argument(
        "--keep_last", type=positive_int, metavar="N", help="delete all but the last N checkpoints (default: keep all)"
    )
    group.add_argument(
        "--keep_every", type=positive_int, metavar="N", help="never delete checkpoints whose step is a multiple of N"
    )
    group.add_argument(
        "--export_dir",
        type=Path,
        metavar="DIR",
        help="at the end of the run, write its Hugging Face folder there, as scripts/export_hf.py does",
    )
    group.add_argument(
        "--keep_best",
        action="store_true",
        help="save whenever validation is better than ever, and keep that one; best.json names it",
    )


def _add_faults(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when something goes wrong")
    group.add_argument(
        "--max_bad_steps",
        type=positive_int,
        default=10,
        metavar="N",
        help="stop after N steps in a row whose gradient is infinite or not a number (none of them is applied)",
    )
    group.add_argument(
        "--on_spike",
        choices=("report", "rollback"),
        default="report",
        help="a loss far above the recent ones: tell, or go back to the last checkpoint and leave that batch out",
    )
    group.add_argument(
        "--stuck_after_minutes",
        type=positive_float,
        default=30.0,
        metavar="N",
        help="end the run when a rank makes no progress for N minutes, and name it",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--preln",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="LayerNorm before each branch (BertForPreTrainingPreLN, the default) or after it (BertForPreTraining)",
    )
    group.add_argument(
        "--finetune", action="store_true", help="load weights only: optimizer, schedule and data begin anew"
    )
    group.add_argument(
        "--gradient_checkpointing",
        type=positive_int,
        nargs="?",
        const=0,
        metavar="LAYERS",
        help="recompute activations in the backward pass, LAYERS at a time (without a number: the root of the depth)",
    )
    group.add_argument("--gelu_checkpoint", action="store_true", help="recompute only the feed-forward activation")
    group.add_argument("--attention_dropout_checkpoint", action="store_true", help="recompute only the attention")
    group.add_argument("--normalize_invertible", action="store_true", help="recompute only the LayerNorms")
    group.add_argument(
        "--progressive_layer_drop",
        action="store_true",
        help="drop layers as the DeepSpeed JSON's progressive_layer_drop block says",
    )
    group.add_argument(
        "--deepspeed_sparse_attention",
        action="store_true",
        help="block-sparse attention as the DeepSpeed JSON's sparse_attention block says",
    )
    group.add_argument(
        "--deepspeed_transformer_kernel",
        action="store_true",
        help="compute the blocks with DeepSpeed's fused CUDA layer; refused with the reason where it cannot be built",
    )
    group.add_argument("--stochastic_mode", action="store_true", help="that layer's faster, non-deterministic mode")
    group.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the wide half of each block; needs a C++ compiler (see docs/performance.md)",
    )


def _add_launcher(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("launcher and DeepSpeed")
    group.add_argument(
        "--local_rank",
        type=int,
        default=-1,
        metavar="N",
        help="passed by launchers; the LOCAL_RANK variable counts where both are given",
    )
    group.add_argument("--deepspeed", action="store_true", help="accepted; the DeepSpeed engine is always used")
    group.add_argument(
        "--deepspeed_config", type=Path, metavar="FILE", help="the DeepSpeed JSON (default: ds_config.json)"
    )
