"""The charts that TensorBoard shows: their order, their units, and the layout of its Custom Scalars tab.

TensorBoard sorts groups (the part of a tag before "/") by name: probe, train, validation, watch_health, watch_speed,
watch_time.
"""

from collections.abc import Iterable
from typing import NamedTuple

from training.metrics.timing import SECTIONS


class Chart(NamedTuple):
    tag: str
    description: str  # with the unit


SUM_NOTE = "masked-LM loss plus sentence loss"
NATS = "nats, mean over the steps since the last report"
# key of metrics.jsonl → chart, by kind of line
TRAIN = {
    "loss": Chart("train/loss", f"{SUM_NOTE}; {NATS}"),
    "learning_rate": Chart("train/lr", "learning rate of the last step"),
    "mlm_accuracy": Chart("train/mlm_accuracy", "share of masked tokens predicted correctly, 0 to 1"),
    "mlm_loss": Chart("train/mlm_loss", f"cross entropy of masked tokens; {NATS}"),
    "nsp_accuracy": Chart("train/nsp_accuracy", "share of sentence pairs classified correctly, 0 to 1"),
    "nsp_loss": Chart("train/nsp_loss", f"cross entropy of sentence pairs; {NATS}"),
    "tokens_per_second": Chart("train/tokens_per_second", "real tokens (without padding) per second, all ranks"),
    "epoch": Chart("watch_health/epoch", "passes over the data so far"),
    "grad_norm": Chart("watch_health/grad_norm", "norm of the last step's gradient, before clipping"),
    "loss_scale": Chart("watch_health/loss_scale", "fp16 loss scale"),
    "masking_rate": Chart("watch_health/masking_rate", "masked tokens as a share of real tokens, 0 to 1"),
    "memory_gib": Chart("watch_health/memory_gib", "GiB: peak memory so far, of the rank with the most"),
    "padding_share": Chart("watch_health/padding_share", "padding as a share of all positions, 0 to 1"),
    "skipped_steps": Chart("watch_health/skipped_steps", "steps skipped so far: overflow, or not finite"),
    "tokens": Chart("watch_health/tokens", "real tokens so far"),
    "data_wait_share": Chart("watch_speed/data_wait_share", "share of the time spent waiting for data, 0 to 1"),
    "matmul_share": Chart("watch_speed/matmul_share", "the model's FLOP/s over those of plain matrix products, 0 to 1"),
    "model_flops_per_second": Chart("watch_speed/model_flops_per_second", "FLOP/s that the model needs, all ranks"),
    "samples_per_second": Chart("watch_speed/samples_per_second", "rows per second, all ranks"),
    "seconds_per_step": Chart("watch_speed/seconds_per_step", "seconds, without validation and checkpoints"),
}
VALIDATION = {
    "loss": Chart("validation/loss", f"{SUM_NOTE}; nats"),
    "mlm_accuracy": Chart("validation/mlm_accuracy", "share of masked tokens predicted correctly, 0 to 1"),
    "mlm_loss": Chart("validation/mlm_loss", "cross entropy of masked tokens; nats"),
    "nsp_accuracy": Chart("validation/nsp_accuracy", "share of sentence pairs classified correctly, 0 to 1"),
    "nsp_loss": Chart("validation/nsp_loss", "cross entropy of sentence pairs; nats"),
    "perplexity": Chart("validation/perplexity", "exp(masked-LM loss)"),
}
PROBE_NOTE = "score of a task without fine-tuning: accuracy from 0 to 1, or a correlation from -1 to 1"
# Only with several ranks.
RANKS = {
    "slowest_over_fastest_rank": Chart("watch_speed/slowest_over_fastest_rank", "time for the same work, a ratio"),
    "slowest_rank": Chart("watch_speed/slowest_rank", "number of the slowest rank"),
}
# Only with --log_details.
DETAILS = {
    "window_steps": Chart("watch_time/window_steps", "steps in this report"),
    **{
        f"seconds_{section}": Chart(f"watch_time/seconds_{section}", "seconds since the last report, mean over ranks")
        for section in (*SECTIONS, "other")
    },
}

# The Custom Scalars tab: category → title → charts drawn into one.
LAYOUT: dict[str, dict[str, list[Chart]]] = {
    "loss": {
        "loss (nats)": [TRAIN["loss"], VALIDATION["loss"]],
        "masked-LM loss (nats)": [TRAIN["mlm_loss"], VALIDATION["mlm_loss"]],
        "masked-LM accuracy": [TRAIN["mlm_accuracy"], VALIDATION["mlm_accuracy"]],
        "learning rate": [TRAIN["learning_rate"]],
    },
    "speed": {
        "real tokens per second": [TRAIN["tokens_per_second"]],
        "seconds per step": [TRAIN["seconds_per_step"]],
        "data wait and matmul speed, as shares": [
            TRAIN["data_wait_share"],
            TRAIN["matmul_share"],
        ],
    },
    "health": {
        "gradient norm": [TRAIN["grad_norm"]],
        "skipped steps": [TRAIN["skipped_steps"]],
        "peak memory (GiB)": [TRAIN["memory_gib"]],
        "loss scale (fp16)": [TRAIN["loss_scale"]],
    },
}
# The columns of the table of runs (HParams): its figures are the last values of these charts.
RESULTS = (
    *(VALIDATION[key] for key in ("mlm_loss", "mlm_accuracy", "nsp_accuracy", "perplexity")),
    *(TRAIN[key] for key in ("mlm_loss", "mlm_accuracy", "tokens", "tokens_per_second")),
)


def charts_of(kind: str, *, num_ranks: int, with_details: bool, keys: Iterable[str] = ()) -> dict[str, Chart]:
    """The charts of lines of `kind` ("train", "validation" or "probe"), by key. Probes have those of their `keys`."""
    if kind == "validation":
        return VALIDATION
    if kind == "probe":
        return {key: Chart(f"probe/{key}", PROBE_NOTE) for key in keys}
    return {**TRAIN, **(RANKS if num_ranks > 1 else {}), **(DETAILS if with_details else {})}
