"""--export_dir: a run ends with its Hugging Face folder."""

from common.console import console
from training.build import Run
from training.checkpoints.state import tag_of
from training.export.hugging_face import export_checkpoint
from training.runtime import collectives


def export_last_checkpoint(run: Run) -> None:
    """Export the checkpoint of where the run is, when it was asked to. Called on every rank; rank 0 writes.

    The weights come from the checkpoint's files, so every ZeRO stage is exported alike, and a run that was killed on
    the way exports when it is started again.
    """
    output = run.settings.flags.export_dir
    if output is None:
        return
    checkpoint = run.checkpoints.folder / tag_of(run.state)
    metrics = run.settings.runs / "metrics.jsonl"

    def export() -> None:
        export_checkpoint(checkpoint, output, run.settings.tokenizer, metrics, flag="--export_dir")

    collectives.all_ranks_from_main(export)
    console.say(f"export: {output}")
