"""The launcher's command line: every flag, its default and its meaning."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from common.errors import Problems
from common.flags import FlagGroup
from common.help import HelpFormatter, Parser, seed_number, whole_number
from data.masking import UNITS
from training.plan.learning_rate import SCHEDULES

NO_RESTARTS = (
    "--max_restarts: this launcher does not restart itself. To restart a run that dies, start it with `torchrun "
    "--standalone --nproc_per_node N --max-restarts R deepspeed_train.py …`; see docs/clusters.md"
)
PRECISIONS = ("auto", "fp32", "fp16", "bf16")


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above zero, but is {text}")
    return value


def build_parser() -> Parser:
    parser = Parser(
        prog="deepspeed_train.py",
        description="Pretrain a BERT with DeepSpeed on sharded HDF5 data. Start it with `deepspeed` for many ranks or "
        "with `python` for one. The same command, run again, goes on where it was.",
        formatter_class=HelpFormatter,
    )
    _add_required(parser)
    _add_data(parser)
    _add_training(parser)
    _add_checkpoints(parser)
    _add_faults(parser)
    _add_model(parser)
    _add_launcher(parser)
    return parser


def read_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Problems]:
    """The flags, and what is wrong with them, to be told with what is wrong with the files that they name."""
    flags, problems = build_parser().collect(argv)
    is_restarts = [message.startswith("unknown flag '--max_restarts") for message in problems.messages]
    problems.messages = [
        NO_RESTARTS if found else message for found, message in zip(is_restarts, problems.messages, strict=True)
    ]
    return flags, problems


def _add_required(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "required")
    flags.file("--config-file", "--cf", dest="config_file", required=True, help="the model JSON")
    flags.folder("--output_dir", required=True, help="where checkpoints and logs are written")


def _add_data(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "data")
    flags.count("--max_seq_length", default=512, metavar="S", help="tokens in a row")
    flags.count(
        "--max_predictions_per_seq",
        "--max_pred",
        default=80,
        metavar="P",
        help="the most masked tokens in a row",
    )
    flags.folder(
        "--data_path_prefix",
        default=Path(),
        help="folder that the model JSON's dataset folders are below (default: the current folder)",
    )
    flags.folder("--validation_data_path_prefix", help="the same for the validation data (default: --data_path_prefix)")
    flags.switch(
        "--verify_data", help="before training, compare every data file with its manifest's digest (reads all of it)"
    )
    flags.switch("--use_nvidia_dataset", help="HDF5 shards; the only kind there is, so accepted and implied")
    flags.switch(
        "--do_lower_case",
        default=None,
        help="insist on a lower-casing tokenizer; refused when the tokenizer found does not lower-case",
    )
    flags.switch("--dynamic_masking", help="draw new masks every epoch instead of using the shards' own")
    flags.add(
        "--masking_rate",
        default="0.15",
        metavar="RATE",
        help="share of tokens that --dynamic_masking predicts, or a schedule over tokens seen: 0:0.30,100M:0.15",
    )
    flags.add(
        "--masking_unit",
        choices=UNITS,
        default="token",
        help="what --dynamic_masking masks: single tokens, whole words, or spans of words",
    )
    flags.count(
        "--refresh_bucket_size",
        default=1,
        help="only 1 is accepted: datasets are mixed row by row, so there are no buckets to repeat",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "training")
    flags.add(
        "--seed",
        type=seed_number,
        default=42,
        metavar="N",
        help="seed of all that is random; a run keeps the one it began with",
    )
    flags.add("--lr_schedule", default="LE", choices=sorted(SCHEDULES), help="shape of the learning rate")
    flags.add("--lr_offset", type=float, default=0.0, metavar="X", help="added to the rate at every step")
    flags.switch("--rewarmup", help="count the schedule's steps from the checkpoint that the run began with")
    flags.count("--max_steps", help="end after N optimizer steps of this run")
    flags.add(
        "--batch_schedule",
        metavar="POINTS",
        help="rows a step over tokens seen: 0:256,1G:4096; replaces the DeepSpeed JSON's train_batch_size",
    )
    flags.add(
        "--length_schedule",
        metavar="POINTS",
        help="tokens in a row over tokens seen: 0:128,900M:512; rises to --max_seq_length, with as many more of the "
        "shorter rows a step as keep its tokens",
    )
    flags.add(
        "--time_budget",
        metavar="TIME",
        help="end after this much time (90s, 45m, 24h, 1d12h), restarts included; the schedule follows the clock "
        "instead of the steps",
    )
    flags.count("--max_steps_per_epoch", help="go on to the next epoch after N steps in one")
    flags.add(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="auto: what the DeepSpeed JSON asks for where this machine can do it, else fp32 with a warning; any other "
        "value overrides the JSON",
    )
    flags.count("--print_steps", default=100, help="steps between two reports")
    flags.count("--validate_every_steps", help="steps between two validations (default: only at the end)")
    flags.switch(
        "--log_histograms",
        help="at every validation (at every checkpoint where there is no validation data), histograms of all weights "
        "to TensorBoard (not with ZeRO stage 3)",
    )
    flags.switch(
        "--dry_run",
        help="build everything, take a few steps on one batch, say what the run would cost, and write nothing",
    )
    flags.add(
        "--job_name", metavar="NAME", help="names the run's folders below --output_dir (default: the model JSON's name)"
    )


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "checkpoints")
    flags.folder(
        "--load_training_checkpoint",
        "--load_cp",
        help="begin this run from a checkpoint of another one (a saved_models/<job_name> folder)",
    )
    flags.add(
        "--load_checkpoint_id", "--load_cp_id", metavar="TAG", help="which one in that folder (default: its newest)"
    )
    flags.add(
        "--use_pretrain",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="begin from the weights of a Hugging Face folder (without FOLDER: the model JSON's bert_model_file)",
    )
    flags.count("--save_every_steps", help="steps between two checkpoints within an epoch")
    flags.add(
        "--save_every_minutes", type=positive_float, metavar="N", help="minutes between two checkpoints, by the clock"
    )
    flags.add(
        "--ckpt_to_save",
        type=whole_number,
        nargs="+",
        metavar="EPOCH",
        help="save only at the end of these epochs and at the end of the run (default: every epoch)",
    )
    flags.count("--keep_last", help="delete all but the last N checkpoints (default: keep all)")
    flags.count("--keep_every", help="never delete checkpoints whose step is a multiple of N")
    flags.folder(
        "--export_dir",
        help="at the end of the run, write its Hugging Face folder there, as scripts/export_hf.py does: a new or empty "
        "folder, or an earlier export, whose files are replaced",
    )
    flags.switch(
        "--keep_best", help="save whenever validation is better than ever, and keep that one; best.json names it"
    )


def _add_faults(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "when something goes wrong")
    flags.count(
        "--max_bad_steps",
        default=10,
        help="stop after N steps in a row whose gradient is infinite or not a number; none of them is applied",
    )
    flags.add(
        "--on_spike",
        choices=("report", "rollback"),
        default="report",
        help="a loss far above the recent ones: tell, or go back to the last checkpoint and leave that batch out",
    )
    flags.add(
        "--stuck_after_minutes",
        type=positive_float,
        default=30.0,
        metavar="N",
        help="end the run when a rank makes no progress for N minutes, and name it",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "model")
    flags.add(
        "--preln",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="LayerNorm before each branch, as BertForPreTrainingPreLN has it, or after it, as BertForPreTraining",
    )
    flags.switch("--finetune", help="load weights only: optimizer, schedule and data begin anew")
    flags.count(
        "--gradient_checkpointing",
        nargs="?",
        const=0,
        metavar="LAYERS",
        help="recompute activations in the backward pass, LAYERS at a time (without a number: the root of the depth)",
    )
    flags.switch("--gelu_checkpoint", help="recompute only the feed-forward activation")
    flags.switch("--attention_dropout_checkpoint", help="recompute only the attention")
    flags.switch("--normalize_invertible", help="recompute only the LayerNorms")
    flags.switch(
        "--progressive_layer_drop", help="drop layers as the DeepSpeed JSON's progressive_layer_drop block says"
    )
    flags.switch(
        "--deepspeed_sparse_attention",
        help="block-sparse attention as the DeepSpeed JSON's sparse_attention block says",
    )
    flags.switch(
        "--deepspeed_transformer_kernel",
        help="compute the blocks with DeepSpeed's fused CUDA layer; refused with the reason where it cannot be built",
    )
    flags.switch("--stochastic_mode", help="that layer's faster, non-deterministic mode")
    flags.switch(
        "--compile", help="torch.compile the wide half of each block; needs a C++ compiler (see docs/performance.md)"
    )


def _add_launcher(parser: argparse.ArgumentParser) -> None:
    flags = FlagGroup(parser, "launcher and DeepSpeed")
    flags.add(
        "--local_rank",
        type=int,
        default=-1,
        metavar="N",
        help="passed by launchers; the LOCAL_RANK variable counts where both are given",
    )
    flags.switch("--deepspeed", help="accepted; the DeepSpeed engine is always used")
    flags.file("--deepspeed_config", help="the DeepSpeed JSON (default: ds_config.json)")
