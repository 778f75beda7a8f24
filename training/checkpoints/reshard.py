"""ZeRO checkpoints: weights and optimizer states by parameter name, and resharding for another number of ranks.

Stages 1 and 2 concatenate the parameters of a group and split the result into equal parts, one per rank. Stage 3 splits
each parameter by itself, padded to a multiple of the ranks, and concatenates a rank's slices of a group. The names and
shapes are in the model's file. Optimizer tensors with one number per weight have the same layout, except for Muon's
momentum at stages 1 and 2: each rank has the whole momentum of every parameter that its part overlaps.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from training.checkpoints.paths import FIRST_MODEL_FILE, MODEL_FILE, optimizer_files, rank_of
from training.engine.checkpoint_files import read_file

WEIGHT = "fp32"  # the key beside those of the optimizer: exp_avg, exp_avg_sq …
MOMENTUM = "momentum_buffer"  # Muon's
Pieces = list[Tensor]


@dataclass(frozen=True)
class ZeroCheckpoint:
    """The ZeRO files of a checkpoint, by rank. Tensors are memory-mapped."""

    folder: Path
    model: dict[str, Any]
    ranks: list[dict[str, Any]]  # each rank's optimizer_state_dict

    @classmethod
    def read(cls, folder: Path) -> "ZeroCheckpoint":
        files = optimizer_files(folder)
        if [rank_of(path) for path in files] != list(range(len(files))):
            found = ", ".join(path.name for path in files)
            raise UserError(f"{folder}: files of some ranks are missing (found {found}). Use another checkpoint")
        whole = folder / MODEL_FILE
        model = read_file(whole if whole.exists() else folder / FIRST_MODEL_FILE)
        return cls(folder, model, [read_file(path)["optimizer_state_dict"] for path in files])

    @property
    def is_sliced(self) -> bool:
        """Whether each parameter was split by itself: stage 3."""
        return "fp32_flat_groups" in self.ranks[0]

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

    def _join(self, index: int, key: str, pieces: Pieces, sizes: dict[str, int]) -> dict[str, Tensor]:
        if self.is_sliced:
            return _join_sliced(pieces, sizes)
        length = self.ranks[0]["single_partition_of_fp32_groups"][index].numel()
        if key == MOMENTUM and _is_whole(pieces, sizes, length):
            return _join_whole(pieces, sizes, length)
        return _join_flat(pieces, sizes)

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights by name, with their shapes; tied ones under each of their names."""
        shapes = {name: shape for group in self.model["param_shapes"] for name, shape in group.items()}
        found = {name: states[WEIGHT].view(shapes[name]) for name, states in self.tensors.items()}
        for alias, name in self.model["shared_params"].items():
            found[alias] = found[name]
        return found | {name: self.model["module"][name] for name in self.model["buffer_names"]}

    def _group(self, index: int) -> dict[str, Pieces]:
        """The parts of group `index` by key, each in the order of the ranks."""
        weights = "fp32_flat_groups" if self.is_sliced else "single_partition_of_fp32_groups"
        parts = {WEIGHT: [rank[weights][index] for rank in self.ranks]}
        states = [self.state_of(rank, index) for rank in self.ranks]
        for key, value in states[0].items():
            if is_laid_out(value):
                # A rank whose part is only padding has no momentum.
                parts[key] = [state.get(key, value[:0]) if key == MOMENTUM else state[key] for state in states]
        return parts

    def state_of(self, rank: dict[str, Any], index: int) -> dict[str, Any]:
        base = rank["optimizer_state_dict" if self.is_sliced else "base_optimizer_state"]
        return base["state"].get(index, {})


def is_laid_out(value: Any) -> bool:
    """Whether an entry of the optimizer's state has one number per weight, unlike a step count."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.numel() > 1


def _join_flat(pieces: Pieces, sizes: dict[str, int]) -> dict[str, Tensor]:
    whole = torch.cat([piece.flatten() for piece in pieces])
    cuts = whole[: sum(sizes.values())].split(list(sizes.values()))
    return dict(zip(sizes, cuts, strict=True))


def _names_in_part(sizes: dict[str, int], rank: int, length: int) -> list[str]:
    """The parameters that overlap the part of `rank`, when parts have `length` numbers."""
    names, offset = [], 0
    for name, size in sizes.items():
        if offset < (rank + 1) * length and offset + size > rank * length:
            names.append(name)
        offset += size
    return names


def _is_whole(pieces: Pieces, sizes: dict[str, int], length: int) -> bool:
    """Whether these are momenta of whole parameters; with the optimizer on the CPU they are split like the rest."""
    return all(
        piece.numel() == sum(sizes[name] for name in _names_in_part(sizes, rank, length))
        for rank, piece in enumerate(pieces)
    )


def _join_whole(pieces: Pieces, sizes: dict[str, int], length: int) -> dict[str, Tensor]:
    """Join momenta of whole parameters; one that two ranks overlap is on both, and equal."""
    joined: dict[str, Tensor] = {}
    for rank, piece in enumerate(pieces):
        names = _names_in_part(sizes, rank, length)
        joined.update(zip(names, piece.split([sizes[name] for name in names]), strict=True))
    return {name: joined[name] for name in sizes}


def _join_sliced(pieces: Pieces, sizes: dict[str, int]) -> dict[str, Tensor]:
    joined, offset = {}, 0
    for name, size in sizes.items():
        part = math.ceil(size / len(pieces))
        joined[name] = torch.cat([piece[offset : offset + part] for piece in pieces])[:size]
        offset += part
    return joined


def load_for_other_ranks(engine: Any, folder: Path) -> None:
    """Load a checkpoint of any number of ranks into the engine, at the same ZeRO stage."""
    saved = ZeroCheckpoint.read(folder)
    module = engine.module
    if not saved.is_sliced:
        module.load_state_dict(saved.model["module"])
    cut = _cut_sliced if saved.is_sliced else _cut_flat
    world, rank = engine.dp_world_size, engine.global_rank
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = engine.optimizer.fp16_groups if saved.is_sliced else engine.optimizer.round_robin_bit16_groups
    layout = [[names[id(parameter)] for parameter in group] for group in groups]
    lengths = [part.numel() for part in local_parts(engine.optimizer)]
    is_whole = not saved.is_sliced and not engine.zero_cpu_offload()
    engine.optimizer.load_state_dict(
        [
            _state_for(saved, cut, layout, lengths, world, other, with_optimizer=other == rank, is_whole=is_whole)
            for other in range(world)
        ],
        load_optimizer_states=True,
        load_from_fp32_weights=True,
    )
    engine.global_steps = saved.model["global_steps"]
    engine.global_samples = saved.model["global_samples"]
    engine.skipped_steps = saved.model["skipped_steps"]


def local_parts(optimizer: Any) -> list[Tensor]:
    """This rank's fp32 part of every group."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def _state_for(
    saved: ZeroCheckpoint,
    cut: Any,
    layout: list[list[str]],
    lengths: list[int],
    world: int,
    rank: int,
    with_optimizer: bool,
    is_whole: bool,
) -> dict[str, Any]:
    """The optimizer_state_dict that `rank` of `world` would have saved.

    `is_whole`: Muon's momentum is that of whole parameters.
    """
    first = saved.ranks[0]

    def part(index: int, key: str) -> Tensor:
        names = layout[index]
        if key == MOMENTUM and is_whole:
            sizes = {name: saved.tensors[name][key].numel() for name in names}
            names = _names_in_part(sizes, rank, lengths[index])
            return torch.cat([saved.tensors[name][key] for name in names] or [torch.zeros(0)])
        return cut([saved.tensors[name][key] for name in names], world, rank, lengths[index])

    weights = [part(index, WEIGHT) for index in range(len(layout))]
    key = "optimizer_state_dict" if saved.is_sliced else "base_optimizer_state"
    base = dict(first[key])
    if with_optimizer:
        base["state"] = {
            index: {
                name: part(index, name) if is_laid_out(value) else value
                for name, value in saved.state_of(first, min(index, len(first[key]["state"]) - 1)).items()
            }
            for index in range(len(layout))
            if first[key]["state"]
        }
    if saved.is_sliced:
        base["param_groups"] = _number_groups(base["param_groups"], layout, saved)
        return {**first, key: base, "fp32_flat_groups": weights}
    sizes = [sum(saved.tensors[name][WEIGHT].numel() for name in names) for names in layout]
    lean = [
        weight[: max(0, min(length, size - rank * length))]
        for weight, length, size in zip(weights, lengths, sizes, strict=True)
    ]
    return {**first, key: base, "single_partition_of_fp32_groups": lean}


def _number_groups(
    groups: list[dict[str, Any]], layout: list[list[str]], saved: ZeroCheckpoint
) -> list[dict[str, Any]]:
    """The parameter groups for this engine: stage 3 splits large groups by the size of a rank's part."""
    group_of = {}
    for group, members in enumerate(groups):
        for index in members["params"]:
            group_of.update(dict.fromkeys(saved.model["param_shapes"][index], group))
    numbered: list[list[int]] = [[] for _ in groups]
    for index, names in enumerate(layout):
        numbered[group_of[names[0]]].append(index)
    return [{**group, "params": numbers} for group, numbers in zip(groups, numbered, strict=True)]


def _cut_flat(whole: Pieces, world: int, rank: int, length: int) -> Tensor:
    flat = torch.cat(whole)
    padded = torch.nn.functional.pad(flat, (0, world * length - flat.numel()))
    return padded[rank * length : (rank + 1) * length]


def _cut_sliced(whole: Pieces, world: int, rank: int, length: int) -> Tensor:
    slices = []
    for tensor in whole:
        part = math.ceil(tensor.numel() / world)
        piece = tensor[rank * part : (rank + 1) * part]
        slices.append(torch.nn.functional.pad(piece, (0, part - piece.numel())))
    flat = torch.cat(slices)
    return torch.nn.functional.pad(flat, (0, length - flat.numel()))
