"""Checkpoints loaded into an engine of any number of ranks; ZeRO's weights and optimizer states by parameter name.

Stages 1 and 2 concatenate the parameters of a group and split the result into equal parts, one per rank. Stage 3 splits
each parameter by itself, padded to a multiple of the ranks, and concatenates a rank's slices of a group. The names and
shapes are in the model's file. Optimizer tensors with one number per weight have the same layout, except for Muon's
momentum at stages 1 and 2: each rank has the whole momentum of every parameter that its part overlaps.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.console import console
from common.errors import UserError
from common.words import counted
from training.checkpoints.paths import FIRST_MODEL_FILE, MODEL_FILE, optimizer_files
from training.checkpoints.state import TrainingState
from training.engine.checkpoint_files import read_file
from training.engine.gradients import enable_overflow_checks

WEIGHT = "fp32"  # the key beside those of the optimizer: exp_avg, exp_avg_sq …
MOMENTUM = "momentum_buffer"  # Muon's
Pieces = list[Tensor]


def all_ranks_load_engine(engine: Any, checkpoint: Path, saved: TrainingState, world_size: int) -> None:
    """Load weights, optimizer state and counters. The optimizer's options stay those of the DeepSpeed JSON."""
    options = [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in engine.optimizer.param_groups
    ]
    if saved.world_size != world_size and engine.zero_optimization():
        console.say(f"{checkpoint}: saved by {counted(saved.world_size, 'rank')}, resharded for {world_size}")
        load_for_other_ranks(engine, checkpoint)
    else:
        found, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name, load_lr_scheduler_states=False)
        if found is None:
            raise UserError(f"{checkpoint}: DeepSpeed finds none of its files there. Use another checkpoint")
    for group, values in zip(engine.optimizer.param_groups, options, strict=True):
        group.update(values)
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = engine.gradient_clipping()
    enable_overflow_checks(engine)  # a load replaces the loss scaler


def load_for_other_ranks(engine: Any, folder: Path) -> None:
    """Load a checkpoint of any number of ranks into the engine, at the same ZeRO stage."""
    saved, optimizer = ZeroCheckpoint.read(folder), engine.optimizer
    if saved.is_sliced:
        groups, parts = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
    else:
        groups, parts = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        engine.module.load_state_dict(saved.model["module"])
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    layout = [[names[id(parameter)] for parameter in group] for group in groups]
    lengths, world = [part.numel() for part in parts], engine.dp_world_size
    is_whole = not saved.is_sliced and not engine.zero_cpu_offload()
    states = [
        saved.state_for(rank, world, layout, lengths, is_whole, with_optimizer=rank == engine.global_rank)
        for rank in range(world)
    ]
    optimizer.load_state_dict(states, load_optimizer_states=True, load_from_fp32_weights=True)
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, saved.model[counter])


@dataclass(frozen=True)
class ZeroCheckpoint:
    """The ZeRO files of a checkpoint, by rank. Tensors are memory-mapped."""

    model: dict[str, Any]
    ranks: list[dict[str, Any]]  # each rank's optimizer_state_dict

    @classmethod
    def read(cls, folder: Path) -> "ZeroCheckpoint":
        files = dict(sorted(optimizer_files(folder).items()))
        if [*files] != list(range(len(files))):
            found = ", ".join(path.name for path in files.values())
            raise UserError(f"{folder}: files of some ranks are missing (found {found}). Use another checkpoint")
        whole = folder / MODEL_FILE
        model = read_file(whole if whole.exists() else folder / FIRST_MODEL_FILE)
        return cls(model, [read_file(path)["optimizer_state_dict"] for path in files.values()])

    @property
    def is_sliced(self) -> bool:
        """Whether each parameter was split by itself: stage 3."""
        return "fp32_flat_groups" in self.ranks[0]

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of a rank's weights and of its optimizer's state."""
        if self.is_sliced:
            return "fp32_flat_groups", "optimizer_state_dict"
        return "single_partition_of_fp32_groups", "base_optimizer_state"

    @cached_property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The whole, flat fp32 weight and optimizer states of each parameter, by its name."""
        tensors: dict[str, dict[str, Tensor]] = {}
        for index, shapes in enumerate(self.model["param_shapes"]):
            sizes = {name: shape.numel() for name, shape in shapes.items()}
            for key, pieces in self._group(index).items():
                for name, tensor in self._join(index, key, pieces, sizes).items():
                    tensors.setdefault(name, {})[key] = tensor
        return tensors

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights by name, with their shapes; tied ones under each of their names."""
        shapes = {name: shape for group in self.model["param_shapes"] for name, shape in group.items()}
        found = {name: states[WEIGHT].view(shapes[name]) for name, states in self.tensors.items()}
        for alias, name in self.model["shared_params"].items():
            found[alias] = found[name]
        return found | {name: self.model["module"][name] for name in self.model["buffer_names"]}

    def _group(self, index: int) -> dict[str, Pieces]:
        """The parts of group `index` by key, each in the order of the ranks."""
        weights, base = self.keys
        parts = {WEIGHT: [rank[weights][index] for rank in self.ranks]}
        states = [rank[base]["state"].get(index, {}) for rank in self.ranks]
        for key, value in states[0].items():
            if is_laid_out(value):
                # A rank whose part is only padding has no momentum.
                parts[key] = [state.get(key, value[:0]) if key == MOMENTUM else state[key] for state in states]
        return parts

    def _join(self, index: int, key: str, pieces: Pieces, sizes: dict[str, int]) -> dict[str, Tensor]:
        if self.is_sliced:
            return _join_sliced(pieces, sizes)
        length = self.ranks[0]["single_partition_of_fp32_groups"][index].numel()
        whole = _join_whole(pieces, sizes, length) if key == MOMENTUM else None
        return _join_flat(pieces, sizes) if whole is None else whole

    def state_for(
        self, rank: int, world: int, layout: list[list[str]], lengths: list[int], is_whole: bool, with_optimizer: bool
    ) -> dict[str, Any]:
        """The optimizer_state_dict that `rank` of `world` would have saved.

        `layout`: the parameters of each group. `lengths`: how many numbers a rank's part of each group has. `is_whole`:
        Muon's momentum is that of whole parameters.
        """
        first, (weights_key, base_key) = self.ranks[0], self.keys

        def part(index: int, key: str) -> Tensor:
            tensors, length = {name: self.tensors[name][key] for name in layout[index]}, lengths[index]
            if key == MOMENTUM and is_whole:
                sizes = {name: tensor.numel() for name, tensor in tensors.items()}
                return torch.cat([tensors[name] for name in _names_in_part(sizes, rank, length)] or [torch.zeros(0)])
            if self.is_sliced:
                cut = _cut_sliced([*tensors.values()], world, rank)
            else:
                cut = torch.cat([*tensors.values()])[rank * length : (rank + 1) * length]
            is_unpadded = key == WEIGHT and not self.is_sliced
            return cut if is_unpadded else pad(cut, (0, length - cut.numel()))

        base = dict(first[base_key])
        states = base["state"]
        if with_optimizer and states:
            base["state"] = {
                index: {
                    key: part(index, key) if is_laid_out(value) else value
                    for key, value in states.get(min(index, len(states) - 1), {}).items()
                }
                for index in range(len(layout))
            }
        if self.is_sliced:
            base["param_groups"] = self._number_groups(base["param_groups"], layout)
        return {**first, base_key: base, weights_key: [part(index, WEIGHT) for index in range(len(layout))]}

    def _number_groups(self, groups: list[dict[str, Any]], layout: list[list[str]]) -> list[dict[str, Any]]:
        """The parameter groups for this engine: stage 3 splits large groups by the size of a rank's part."""
        group_of = {
            name: group
            for group, members in enumerate(groups)
            for index in members["params"]
            for name in self.model["param_shapes"][index]
        }
        numbered: list[list[int]] = [[] for _ in groups]
        for index, names in enumerate(layout):
            numbered[group_of[names[0]]].append(index)
        return [{**group, "params": numbers} for group, numbers in zip(groups, numbered, strict=True)]


def is_laid_out(value: Any) -> bool:
    """Whether an entry of the optimizer's state has one number per weight, unlike a step count."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.numel() > 1


def _join_flat(pieces: Pieces, sizes: dict[str, int]) -> dict[str, Tensor]:
    whole = torch.cat([piece.flatten() for piece in pieces])
    cuts = whole[: sum(sizes.values())].split(list(sizes.values()))
    return dict(zip(sizes, cuts, strict=True))


def _names_in_part(sizes: dict[str, int], rank: int, length: int) -> list[str]:
    """The parameters that overlap the part of `rank`, when parts have `length` numbers."""
    first, end = rank * length, (rank + 1) * length
    ends = accumulate(sizes.values())
    return [name for name, after in zip(sizes, ends, strict=True) if after - sizes[name] < end and after > first]


def _join_whole(pieces: Pieces, sizes: dict[str, int], length: int) -> dict[str, Tensor] | None:
    """Join momenta of whole parameters; one that two ranks overlap is on both, and equal.

    None: they are split like the rest, because the optimizer was on the CPU.
    """
    joined: dict[str, Tensor] = {}
    for rank, piece in enumerate(pieces):
        names = _names_in_part(sizes, rank, length)
        if piece.numel() != sum(sizes[name] for name in names):
            return None
        joined.update(zip(names, piece.split([sizes[name] for name in names]), strict=True))
    return {name: joined[name] for name in sizes}


def _join_sliced(pieces: Pieces, sizes: dict[str, int]) -> dict[str, Tensor]:
    joined, offset = {}, 0
    for name, size in sizes.items():
        part = math.ceil(size / len(pieces))
        joined[name] = torch.cat([piece[offset : offset + part] for piece in pieces])[:size]
        offset += part
    return joined


def _cut_sliced(tensors: Pieces, world: int, rank: int) -> Tensor:
    slices = []
    for tensor in tensors:
        part = math.ceil(tensor.numel() / world)
        piece = tensor[rank * part : (rank + 1) * part]
        slices.append(pad(piece, (0, part - piece.numel())))
    return torch.cat(slices)
