"""Draw a sparse-attention layout as a PNG: which blocks of keys each block of queries attends to."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from torch import Tensor

from common.console import console
from common.errors import UserError, run_command
from common.help import HelpFormatter, Parser, positive_int
from common.json_files import load_json
from nvidia.attention.sparsity import SparseAttention, make_layout

BLOCK = "sparse_attention"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="draw_layout.py", description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("config", type=Path, metavar="FILE", help=f"DeepSpeed JSON with a block '{BLOCK}'")
    add("--output", type=Path, required=True, metavar="FILE", help=".png file to write")
    add("--max_seq_length", type=positive_int, default=512, metavar="N", help="tokens per row")
    add("--num_attention_heads", type=positive_int, default=12, metavar="N", help="drawn side by side if they differ")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    if flags.output.suffix != ".png":
        raise UserError(f"--output {flags.output}: expected a name that ends with .png")
    content = load_json(flags.config, "a DeepSpeed JSON")
    if BLOCK not in content:
        raise UserError(f"{flags.config}: has no block '{BLOCK}'. Add one, or give another file.")
    sparse = SparseAttention.from_dict(content[BLOCK])
    layout = make_layout(sparse, flags.num_attention_heads, flags.max_seq_length)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    draw(layout, sparse, flags.max_seq_length, flags.output)
    console.say(f"{layout.float().mean():.1%} of the blocks are attended to; drawn to {flags.output}")
    return 0


def draw(layout: Tensor, sparse: SparseAttention, length: int, output: Path) -> None:
    """Draw one panel per layout of [A or 1, N, N], with axes in tokens."""
    columns = math.ceil(math.sqrt(len(layout)))
    rows = math.ceil(len(layout) / columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(4 * columns, 4 * rows), layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    end = layout.shape[-1] * sparse["block"]
    for head, axes in enumerate(grid.flat):
        if head >= len(layout):
            axes.set_axis_off()
            continue
        axes.imshow(layout[head].numpy(), cmap="Blues", vmin=0, vmax=1, extent=(0, end, end, 0), interpolation="none")
        axes.set(title=f"head {head}" if len(layout) > 1 else "all heads", xlabel="keys", ylabel="queries")
    figure.suptitle(f"{sparse.mode}, {length} tokens in blocks of {sparse['block']}")
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    run_command(main)
