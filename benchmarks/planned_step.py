"""Planned against measured seconds of a step on this machine: one rank, and two that share its cores.

The planner's accelerator is this machine, measured at run time as `plan_cluster.py --gpus 2:here` does. The step is
that of the model in a DeepSpeed engine. BENCHMARK_CLOCK=cpu OMP_NUM_THREADS=1 counts processor time, which other
programs disturb less. Prints a table and, as its last line, JSON with `one_rank_error` and `two_ranks_error`: planned
over measured, minus 1.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing as processes
from torch.multiprocessing.spawn import spawn

from benchmarks.timing import clock
from common.errors import run_command
from common.help import Parser, positive_int
from data.shards.schema import Rows
from data.stream.batches import batch_from_rows
from nvidia.config import BertConfig
from nvidia.cpu.libraries import forced_libraries, use
from nvidia.fastest import measure_libraries
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.support import free_port, make_rows
from training.optimizers.build import build_optimizer
from training.planning.accelerators import Cluster
from training.planning.estimate import Configuration, estimate
from training.planning.measure import measure_here
from training.planning.memory import ZeroSettings
from training.planning.workload import PlannedModel, RowLengths, plan_execution

WIDTH, PREDICTIONS, VOCAB = 128, 20, 8192


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="planned_step.py", description=__doc__)
    parser.add_argument("--hidden_size", type=positive_int, default=256, metavar="H", help="(default: 256)")
    parser.add_argument("--layers", type=positive_int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--micro", type=positive_int, default=16, metavar="B", help="rows per rank (default: 16)")
    parser.add_argument(
        "--steps", type=positive_int, default=6, metavar="N", help="of which the best counts (default: 6)"
    )
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2], help="ZeRO stage (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=flags.hidden_size,
        num_hidden_layers=flags.layers,
        num_attention_heads=max(1, flags.hidden_size // 64),
        intermediate_size=4 * flags.hidden_size,
    )
    errors = {}
    print(f"{'ranks':>6} {'planned s':>10} {'measured s':>11} {'error':>7}")
    for ranks in (1, 2):
        queue = processes.get_context("spawn").SimpleQueue()
        spawn(train, args=(ranks, free_port(), config, flags, queue), nprocs=ranks)
        measured = queue.get()
        planned = plan_step(config, ranks, flags)
        errors[ranks] = planned / measured - 1
        print(f"{ranks:>6} {planned:>10.3f} {measured:>11.3f} {errors[ranks]:>+7.1%}")
    result = {"one_rank_error": round(errors[1], 4), "two_ranks_error": round(errors[2], 4)}
    print(json.dumps({**result, **vars(flags)}))
    return 0


def rows_of(rank: int, micro: int) -> Rows:
    return Rows(**make_rows(micro, WIDTH, PREDICTIONS, seed=rank, vocab=VOCAB))


def train(rank: int, ranks: int, port: int, config: BertConfig, flags: argparse.Namespace, queue: object) -> None:
    """The best step's seconds, put into `queue` by rank 0."""
    import deepspeed

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks) if "OMP_NUM_THREADS" not in os.environ else 1)
    use(forced_libraries() or measure_libraries(config, flags.micro, WIDTH).libraries)  # as a run does
    deepspeed.init_distributed("gloo")
    zero = {"stage": flags.stage, "reduce_bucket_size": 5_000_000}
    model = BertForPreTrainingPreLN(config)
    optimizer, _ = build_optimizer(model, {"type": "AdamW"}, learning_rate=1e-4, weight_decay=0.01, zero=zero)
    settings = {"train_micro_batch_size_per_gpu": flags.micro, "gradient_clipping": 1.0, "zero_optimization": zero}
    settings["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    batch = batch_from_rows(rows_of(rank, flags.micro))
    seconds = []
    for _ in range(flags.steps + 1):
        began = clock()
        engine.backward(engine(batch))
        engine.step()
        seconds.append(clock() - began)
    if rank == 0:
        queue.put(min(seconds[1:]))  # type: ignore[attr-defined]


def plan_step(config: BertConfig, ranks: int, flags: argparse.Namespace) -> float:
    rows = rows_of(0, flags.micro)
    lengths = [float(length) for length in rows.input_mask.sum(axis=1)]
    masked = float((rows.masked_lm_positions > 0).sum()) / flags.micro
    model = PlannedModel(config, RowLengths.of(WIDTH, lengths, masked))
    zero = ZeroSettings(flags.stage, reduce_bucket_size=5_000_000)
    execution = plan_execution(config, "fp32", "cpu", None)
    cluster = Cluster(measure_here(config, ranks, clock), ranks)
    return estimate(model, cluster, Configuration(flags.micro, 1, zero, execution)).step_seconds


if __name__ == "__main__":
    run_command(main)
