"""Facts for the model card that the files of a run contain: its data, its hardware, its validation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.metrics.reader import first_and_last_probe, last_validation, read_metrics


class CardRequest(NamedTuple):
    """What the user states about the model."""

    license: str | None = None  # as Hugging Face names it: apache-2.0
    language: str | None = None  # codes, separated by commas: en,de


class CardFacts(NamedTuple):
    """What the files of a run state; empty where they do not."""

    data: tuple[str, ...] = ()  # a line for each folder of shards
    hardware: str | None = None
    validation: Mapping[str, Any] | None = None
    probes: tuple[Mapping[str, float], Mapping[str, float]] | None = None  # the first and the last


def read_card_facts(checkpoint: Path, metrics: Path | None, step: int) -> CardFacts:
    """The facts of `checkpoint`, which was saved at `step`. What cannot be read is left out."""
    hardware = None
    if metrics is not None:
        ends = [row for row in read_metrics(metrics) if isinstance(row.get("hardware"), str)]
        hardware = ends[-1]["hardware"] if ends else None
    probes = first_and_last_probe(metrics, step)
    return CardFacts(tuple(_describe_data(checkpoint)), hardware, last_validation(metrics, step), probes)


def _describe_data(checkpoint: Path) -> list[str]:
    resolved = _read(checkpoint / "resolved.json")
    flags, model = _object(resolved.get("flags")), resolved.get("model") or _read(checkpoint / "model.json")
    datasets = _object(_object(_object(model).get("data")).get("mixed_seq_datasets"))
    folders = _object(datasets.get(str(flags.get("max_seq_length"))))
    prefix = Path(str(flags.get("data_path_prefix", "")))
    return [_describe_folder(name, prefix / path) for name, path in folders.items() if isinstance(path, str)]


def _describe_folder(name: str, folder: Path) -> str:
    counts = _object(_read(folder / "report.json").get("preparation"))
    settings = _object(_read(folder / "manifest.json").get("settings"))
    parts = [
        f"{counts[key]:,} {key}" for key in ("documents", "sentences", "tokens") if isinstance(counts.get(key), int)
    ]
    if isinstance(settings.get("language"), str):
        parts.append(f"prepared for the language `{settings['language']}`")
    return f"`{name}` ({folder.name}): {', '.join(parts) or 'no report of its preparation was found'}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return _object(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError):
        return {}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
