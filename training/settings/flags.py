"""The launcher's command line: every flag, its type, default and help text, in groups by purpose."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator

from common.errors import Problems, UserError
from common.help import HelpFormatter, Parser, positive_float, positive_int, seed_number, whole_number, zero_or_more
from common.stores import is_url
from data.masking import Unit
from training.plan.learning_rate import SCHEDULES
from training.plan.step_plan import TokenSchedule
from training.plan.time_budget import Duration
from training.runtime.precision import DTYPES
from training.settings.flag_groups import FlagGroup, Metavar, flag
from training.settings.json_keys import TRAINING_BLOCK, find_hints
from training.settings.overrides import Override


def parse_masking_rate(text: str) -> TokenSchedule:
    rates = TokenSchedule.parse(text)
    if not all(0.0 < rate < 1.0 for _, rate in rates.points):
        raise UserError(f"found {text!r}, expected rates between 0 and 1, such as BERT's 0.15")
    return rates


def parse_place(text: str) -> Path | str:
    """A folder, or a URL as it is."""
    return text if is_url(text) else Path(text)


Count = Annotated[int, BeforeValidator(positive_int), Metavar("N")]
Epoch = Annotated[int, BeforeValidator(whole_number), Metavar("EPOCH")]
Seed = Annotated[int, BeforeValidator(seed_number), Metavar("N")]
Amount = Annotated[float, BeforeValidator(positive_float), Metavar("N")]
Offset = Annotated[float, BeforeValidator(zero_or_more), Metavar("X")]
Folder = Annotated[Path, Metavar("DIR")]
Place = Annotated[Path | str, PlainValidator(parse_place), Metavar("DIR|URL")]
File = Annotated[Path, Metavar("FILE")]
Points = Annotated[TokenSchedule, BeforeValidator(TokenSchedule.parse), Metavar("POINTS")]
Rates = Annotated[TokenSchedule, BeforeValidator(parse_masking_rate), Metavar("RATE")]
Rate = Annotated[float, BeforeValidator(positive_float), Metavar("X")]
Setting = Annotated[Override, BeforeValidator(Override.parse), Metavar("KEY=VALUE")]
Time = Annotated[Duration, BeforeValidator(Duration.parse), Metavar("TIME")]


class RequiredFlags(FlagGroup, title="required"):
    config_file: File = flag("the model JSON", ..., "--cf", names=("--config-file",))
    output_dir: Folder = flag("folder for checkpoints and logs", ...)


class DataFlags(FlagGroup, title="data"):
    max_seq_length: Count = flag("tokens per row", 512, metavar="S")
    max_predictions_per_seq: Count = flag("maximum number of masked tokens per row", 80, "--max_pred", metavar="P")
    data_path_prefix: Place = flag(
        "folder that the model JSON's dataset folders are relative to (default: the current folder)", Path()
    )
    validation_data_path_prefix: Place | None = flag("the same for the validation data (default: --data_path_prefix)")
    data_cache: Folder | None = flag(
        "folder on a local disk to which shards are fetched, where the data's folder is a URL"
    )
    data_cache_gb: Amount | None = flag(
        "its size in GB; shards that were used longest ago are removed (default: 90 percent of the free disk)"
    )
    verify_data: bool = flag(
        "before training, compare every data file with the digest in its manifest (reads all of the data)", False
    )
    use_nvidia_dataset: bool = flag("accepted and implied: HDF5 shards are the only data format", False)
    do_lower_case: bool | None = flag(
        "require a lower-casing tokenizer: stop if the tokenizer found does not lower-case"
    )
    dynamic_masking: bool = flag("draw new masks in every epoch instead of using those in the shards", False)
    masking_rate: Rates = flag(
        "share of tokens that --dynamic_masking predicts, or a schedule over tokens seen: 0:0.30,100M:0.15",
        TokenSchedule.parse("0.15"),
    )
    masking_unit: Unit = flag("what --dynamic_masking masks: single tokens, whole words, or spans of words", "token")
    refresh_bucket_size: Count = flag(
        "only 1 is accepted: datasets are mixed row by row, so there are no buckets to repeat", 1
    )

    @property
    def urls(self) -> list[str]:
        return [each for each in (self.data_path_prefix, self.validation_data_path_prefix) if isinstance(each, str)]

    @property
    def data_folder(self) -> Path:
        """--data_path_prefix, or the mirror of its URL."""
        return Path(self.data_path_prefix)

    @property
    def validation_data_folder(self) -> Path | None:
        return None if self.validation_data_path_prefix is None else Path(self.validation_data_path_prefix)


class TrainingFlags(FlagGroup, title="training"):
    seed: Seed = flag("seed of everything random; a run keeps the seed it started with", 42)
    learning_rate: Rate | None = flag(
        "the peak of the schedule; replaces the model JSON's learning_rate for --max_seq_length"
    )
    train_batch_size: Count | None = flag(
        "rows per step over all ranks; replaces the DeepSpeed JSON's train_batch_size"
    )
    find_micro_batch: bool = flag(
        "find the largest train_micro_batch_size_per_gpu that fits in memory, by trying; accumulation keeps the rows "
        "per step",
        False,
    )
    total_training_steps: Count | None = flag(
        "length of the schedule; replaces the model JSON's total_training_steps for --max_seq_length"
    )
    overrides: tuple[Setting, ...] | None = flag(
        "set any value of either JSON file: mixed_seq_training.128.warmup_proportion=0.05, zero_optimization.stage=1",
        names=("--set",),
        action="extend",
    )
    lr_schedule: str = flag("shape of the learning rate", "LE", choices=sorted(SCHEDULES))
    lr_offset: Offset = flag("added to the learning rate at every step", 0.0)
    rewarmup: bool = flag("count the schedule's steps from the checkpoint that the run started from", False)
    max_steps: Count | None = flag("end after N optimizer steps of this run")
    batch_schedule: Points | None = flag(
        "rows per step over tokens seen: 0:256,1G:4096; replaces the DeepSpeed JSON's train_batch_size"
    )
    length_schedule: Points | None = flag(
        "tokens per row over tokens seen: 0:128,900M:512; the last is --max_seq_length. Steps of shorter rows have "
        "proportionally more rows, so all steps have the same number of tokens"
    )
    time_budget: Time | None = flag(
        "end after this much time (90s, 45m, 24h, 1d12h), restarts included; the schedule follows the clock instead "
        "of the steps"
    )
    max_steps_per_epoch: Count | None = flag("continue with the next epoch after N steps in one")
    precision: str = flag(
        "auto: the DeepSpeed JSON's precision if this machine supports it, else fp32 with a warning; any other value "
        "overrides the JSON",
        "auto",
        choices=("auto", *DTYPES),
    )
    print_steps: Count = flag("steps between two reports", 100)
    validate_every_steps: Count | None = flag("steps between two validations (default: only at the end)")
    log_details: bool = flag(
        "also write to TensorBoard: every curve by samples, and the seconds spent in each part of a step", False
    )
    log_histograms: bool = flag(
        "write histograms of all weights to TensorBoard at every validation, or at every checkpoint if there is no "
        "validation data (not with ZeRO stage 3)",
        False,
    )
    sample_sentences: File | None = flag(
        "sentences, one per line, each with one [MASK] (and the answer after a tab), for which TensorBoard shows the "
        "model's guesses (default: parts of the validation data)"
    )
    dry_run: bool = flag(
        "build everything, take a few steps on one batch, report what the run would cost, and write nothing", False
    )
    job_name: Annotated[str, Metavar("NAME")] | None = flag(
        "name of the run's folders in --output_dir (default: the model JSON's name)"
    )


class CheckpointFlags(FlagGroup, title="checkpoints"):
    load_training_checkpoint: Folder | None = flag(
        "start this run from a checkpoint of another one (a saved_models/<job_name> folder)", None, "--load_cp"
    )
    load_checkpoint_id: Annotated[str, Metavar("TAG")] | None = flag(
        "which checkpoint in that folder (default: the newest)", None, "--load_cp_id"
    )
    use_pretrain: Annotated[str, Metavar("FOLDER")] | None = flag(
        "start from the weights of a Hugging Face folder (without FOLDER: the model JSON's bert_model_file)",
        nargs="?",
        const="",
    )
    save_every_steps: Count | None = flag("steps between two checkpoints within an epoch")
    save_every_minutes: Amount | None = flag("minutes between two checkpoints")
    ckpt_to_save: tuple[Epoch, ...] | None = flag(
        "save only at the end of these epochs and at the end of the run (default: every epoch)"
    )
    keep_last: Count | None = flag("delete all but the last N checkpoints (default: keep all)")
    keep_every: Count | None = flag("never delete checkpoints whose step is a multiple of N")
    upload_checkpoints: Annotated[str, Metavar("URL")] | None = flag(
        "copy checkpoints there in the background, below the job's name; a start on a new disk fetches the newest back"
    )
    export_dir: Folder | None = flag(
        "at the end of the run, export the model to a Hugging Face folder, as scripts/export_hf.py does: a new or "
        "empty folder, or an earlier export, whose files are replaced"
    )
    export: Literal["best", "last"] | None = flag(
        "which checkpoint --export_dir exports (default: the best with --keep_best or --keep_best_by, else the last)"
    )
    export_license: Annotated[str, Metavar("ID")] | None = flag(
        "the model card's licence, as Hugging Face names it: apache-2.0"
    )
    export_language: Annotated[str, Metavar("CODES")] | None = flag(
        "the model card's languages, separated by commas: en,de (default: what the preparation of the data knows)"
    )
    keep_best: bool = flag(
        "save whenever the validation loss is the lowest so far, and keep that checkpoint; best.json names it", False
    )
    keep_best_by: Annotated[str, Metavar("NAME")] | None = flag(
        "the same by a probe, such as probe/blimp: save whenever it is the highest so far"
    )

    @property
    def keeps_best(self) -> bool:
        return self.keep_best or self.keep_best_by is not None


class ProbeFlags(FlagGroup, title="probes: what the model can do, measured during the run"):
    probe: tuple[Annotated[str, Metavar("TASK")], ...] | None = flag(
        "score these tasks, as `python -m evaluation.run --tasks` names them, without fine-tuning; tables have the "
        "columns text and label"
    )
    probe_data: Folder | None = flag("folder that holds the data of the tasks, as evaluation.run's --data")
    probe_every_steps: Count | None = flag("steps between two probes (default: at each validation, and at the end)")
    probe_seconds: Amount | None = flag(
        "seconds that one probe of all tasks may take (default: about 1 percent of the time between two probes)"
    )
    stop_after_no_gain: Count | None = flag(
        "end the run when the figure that chooses the best checkpoint, else the first probe, has not improved for N "
        "measurements"
    )


class FaultFlags(FlagGroup, title="when something goes wrong"):
    max_bad_steps: Count = flag(
        "stop after N consecutive steps with an infinite or NaN gradient; none of them is applied", 10
    )
    on_spike: Literal["report", "rollback"] = flag(
        "if the loss is far above the recent ones: report it, or roll back to the last checkpoint and skip that batch",
        "report",
    )
    stuck_after_minutes: Amount = flag(
        "end the run if a rank makes no progress for N minutes, and report which one", 30.0
    )


class ModelFlags(FlagGroup, title="model"):
    preln: bool = flag(
        "LayerNorm before each branch, as in BertForPreTrainingPreLN, or after it, as in BertForPreTraining", True
    )
    finetune: bool = flag("load weights only: optimizer, schedule and data start fresh", False)
    gradient_checkpointing: Count | None = flag(
        "recompute activations in the backward pass, LAYERS at a time (without a number: the square root of the depth)",
        nargs="?",
        const=0,
        metavar="LAYERS",
    )
    gelu_checkpoint: bool = flag("recompute only the feed-forward activation", False)
    attention_dropout_checkpoint: bool = flag("recompute only the attention", False)
    normalize_invertible: bool = flag("recompute only the LayerNorms", False)
    progressive_layer_drop: bool = flag(
        "drop layers as configured by the DeepSpeed JSON's progressive_layer_drop block", False
    )
    deepspeed_sparse_attention: bool = flag(
        "block-sparse attention as configured by the DeepSpeed JSON's sparse_attention block", False
    )
    deepspeed_transformer_kernel: bool = flag(
        "compute the blocks with DeepSpeed's fused CUDA layer; an error gives the reason if it cannot be built", False
    )
    stochastic_mode: bool = flag("that layer's faster, non-deterministic mode", False)
    compile: bool = flag(
        "torch.compile the feed-forward half of each block; needs a C++ compiler (see docs/performance.md)", False
    )


class LauncherFlags(FlagGroup, title="launcher and DeepSpeed"):
    local_rank: Annotated[int, Metavar("N")] = flag("passed by launchers; the LOCAL_RANK variable takes precedence", -1)
    deepspeed: bool = flag("accepted; the DeepSpeed engine is always used", False)
    deepspeed_config: File | None = flag("the DeepSpeed JSON (default: ds_config.json)")


@dataclass(frozen=True)
class CommandLine:
    """All flags, by group. `values()` are those of all groups by name, without those that the user gave wrongly."""

    required: RequiredFlags
    data: DataFlags
    training: TrainingFlags
    checkpoints: CheckpointFlags
    probes: ProbeFlags
    faults: FaultFlags
    model: ModelFlags
    launcher: LauncherFlags

    def values(self) -> dict[str, Any]:
        return {name: value for item in fields(self) for name, value in vars(getattr(self, item.name)).items()}

    def overrides(self, problems: Problems) -> tuple[Override, ...]:
        """What the command line sets in the JSON files: --set, and the flags that are short for it.

        Of two for the same value, which are a problem, the flag counts, so that all others are checked.
        """
        length, given = str(self.data.max_seq_length), self.training
        short = [
            Override(path, value, f"--{path[-1]} {value}")
            for path, value in (
                ((TRAINING_BLOCK, length, "learning_rate"), given.learning_rate),
                ((TRAINING_BLOCK, length, "total_training_steps"), given.total_training_steps),
                (("train_batch_size",), given.train_batch_size),
            )
            if value is not None
        ]
        for first, second in product(given.overrides or (), short):
            if first.path == second.path:
                problems.add(f"{first.source} and {second.source} set the same value; expected one; drop the other")
        return (*(given.overrides or ()), *short)


GROUPS: dict[str, type[FlagGroup]] = dict(CommandLine.__annotations__)


def build_parser() -> Parser:
    parser = Parser(
        prog="deepspeed_train.py",
        description="Pretrain a BERT with DeepSpeed on sharded HDF5 data. Start it with `deepspeed` for many ranks or "
        "with `python` for one. The same command, run again, resumes the run.",
        formatter_class=HelpFormatter,
        hints=find_hints(),
    )
    for group in GROUPS.values():
        group.add_to(parser)
    return parser


def read_arguments(argv: Sequence[str] | None = None) -> tuple[CommandLine, Problems]:
    """The flags, and the problems found in them, to be reported with those of the files that the flags name."""
    arguments, problems = build_parser().collect(argv)
    groups: dict[str, Any] = {name: group.from_arguments(arguments) for name, group in GROUPS.items()}
    return CommandLine(**groups), problems
