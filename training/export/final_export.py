"""--export_dir: a run ends with its Hugging Face folder."""

from pathlib import Path

from common.console import console
from common.errors import UserError
from data.tokenizer import BertTokenizer
from training.export.hugging_face import export_checkpoint
from training.metrics.reader import last_validation
from training.runtime import collectives


def all_ranks_export(checkpoint: Path, output: Path, tokenizer: BertTokenizer | None, metrics: Path) -> None:
    """Export `checkpoint` to `output`. Called on all ranks; rank 0 writes.

    The weights come from the checkpoint's files, so every ZeRO stage is exported alike, and a run that was killed
    during the export repeats it when it is started again.
    """

    def export() -> None:
        export_checkpoint(checkpoint, output, tokenizer, _readable(metrics), flag="--export_dir")

    collectives.all_ranks_from_main(export)
    console.say(f"export: {output}")


def _readable(metrics: Path) -> Path | None:
    """`metrics`; None, with a warning, where the run could not write its figures, which must not prevent the export."""
    try:
        last_validation(metrics)
    except (OSError, UserError) as error:
        console.warn(f"{error}. The model card is written without figures")
        return None
    return metrics
