"""What a person reads: a report's line, the live line, a validation's line."""

from common.console import console


def train_line(step: int, last_step: int | None, figures: dict[str, float], seconds_left: float) -> str:
    """`last_step` None: the clock ends the run."""
    place = f"step {step}" if last_step is None else f"step {step}/{last_step}"
    return (
        f"{place}  loss {figures['loss']:.3f}  mlm {figures['mlm_loss']:.3f} "
        f"({figures['mlm_accuracy']:.1%})  nsp {figures['nsp_loss']:.3f} ({figures['nsp_accuracy']:.1%})  "
        f"rate {figures['learning_rate']:.2e}  norm {figures['grad_norm']:.2f}  "
        f"{figures['tokens_per_second']:,.0f} tokens/s ({figures['matmul_share']:.0%} of matmul)  "
        f"data wait {figures['data_wait_share']:.0%}  left {format_seconds(seconds_left)}"
    )


def first_live_text(epoch: float, loss: float, rate: float, first_report: int) -> str:
    """What stands behind the live bar before the first report: this rank's loss so far."""
    return f"epoch {epoch:.2f}  loss {loss:.3f} so far  rate {rate:.1e}  first report at step {first_report}"


def live_text(epoch: float, figures: dict[str, float], seconds_to_end: float, seconds_to_save: float) -> str:
    """What stands behind the live bar between two reports."""
    return (
        f"epoch {epoch:.2f}  loss {figures['loss']:.3f}  rate {figures['learning_rate']:.1e}  "
        f"{figures['tokens_per_second']:,.0f} tokens/s ({figures['matmul_share']:.0%})  "
        f"ends in {format_seconds(seconds_to_end)}, saves in {format_seconds(seconds_to_save)}"
    )


def say_validation(step: int, figures: dict[str, float]) -> None:
    console.say(
        f"validation at step {step}: mlm loss {figures['mlm_loss']:.3f} (perplexity {figures['perplexity']:.1f}, "
        f"{figures['mlm_accuracy']:.1%} right)  nsp loss {figures['nsp_loss']:.3f} "
        f"({figures['nsp_accuracy']:.1%} right)"
    )


def format_hours(seconds: float) -> str:
    """Always with hours: 0:05:07."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
