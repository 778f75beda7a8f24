"""Lines for people: a report, the live progress bar, a validation."""

from collections.abc import Sequence

from common.words import counted, format_seconds


def train_line(step: int, last_step: int | None, figures: dict[str, float], seconds_left: float, is_part: bool) -> str:
    """The console line of a report. `last_step` None: the time budget ends the run.

    `is_part`: it covers fewer steps than --print_steps, because the run ends or was resumed here.
    """
    place = f"step {step}" if last_step is None else f"step {step}/{last_step}"
    if is_part:
        place += f" (last {counted(int(figures['window_steps']), 'step')} only)"
    nsp = f"  nsp {figures['nsp_loss']:.3f} ({figures['nsp_accuracy']:.1%})" if "nsp_loss" in figures else ""
    return (
        f"{place}  loss {figures['loss']:.3f}  mlm {figures['mlm_loss']:.3f} ({figures['mlm_accuracy']:.1%}){nsp}  "
        f"lr {figures['learning_rate']:.2e}  grad_norm {figures['grad_norm']:.2f}  "
        f"{figures['tokens_per_second']:,.0f} tokens/s  matmul {figures['matmul_share']:.0%}  "
        f"data wait {figures['data_wait_share']:.0%}  ETA {format_seconds(seconds_left)}"
    )


def first_live_text(epoch: float, loss: float, lr: float, first_report: int) -> str:
    """The text of the progress bar before the first report, with this rank's loss so far."""
    return f"epoch {epoch:.2f}  loss {loss:.3f} so far  lr {lr:.1e}  first report at step {first_report}"


def live_text(epoch: float, figures: dict[str, float], seconds_left: float, seconds_to_save: float) -> str:
    """The text of the progress bar between two reports."""
    return (
        f"epoch {epoch:.2f}  loss {figures['loss']:.3f}  lr {figures['learning_rate']:.1e}  "
        f"{figures['tokens_per_second']:,.0f} tokens/s  matmul {figures['matmul_share']:.0%}  "
        f"ETA {format_seconds(seconds_left)}  next save in {format_seconds(seconds_to_save)}"
    )


def validation_line(step: int, figures: dict[str, float], standard_error: float | None = None) -> str:
    """`standard_error`: of the masked-LM loss; None: it is not shown."""
    error = "" if standard_error is None else f" ± {standard_error:.3f}"
    nsp = (
        f"  nsp loss {figures['nsp_loss']:.3f} (accuracy {figures['nsp_accuracy']:.1%})"
        if "nsp_loss" in figures
        else ""
    )
    return (
        f"validation at step {step}: mlm loss {figures['mlm_loss']:.3f}{error} "
        f"(perplexity {figures['perplexity']:.1f}, accuracy {figures['mlm_accuracy']:.1%}){nsp}"
    )


def probe_line(step: int, probes: Sequence[tuple[str, str, int]], figures: dict[str, float]) -> str:
    """`probes`: the name of each, and the unit and number of what it was scored on."""
    sizes = {name: f" ({counted(number, unit)})" for name, unit, number in probes}
    shown = ", ".join(f"{name} {value:.1%}{sizes.get(name, '')}" for name, value in figures.items())
    return f"probe at step {step}: {shown}"
