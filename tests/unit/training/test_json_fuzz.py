"""Both JSON files damaged at random: the outcome is always consistent settings or one UserError."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from training.runtime.ranks import RankInfo
from training.settings.flags import read_arguments
from training.settings.resolve import resolve_settings

PROJECT = Path(__file__).resolve().parents[3]
MODELS = ("bert_base.json", "configs/bert_tiny.json", "configs/bert_large.json")
ENGINES = ("ds_config.json", "configs/ds_bf16_zero3.json", "configs/ds_lamb_32k.json", "configs/ds_cpu_muon.json")
ROUNDS = 150  # damaged versions of each file
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        "auto",
        "fp16",
        "é\u0000\ud800",
        "x" * 5000,
        0,
        1,
        -1,
        3,
        0.5,
        -0.0,
        1e-320,
        1e308,
        10**30,
    ),
    *(10**400, [], {}, [1], ["a", None], {"a": 1}, [[[[]]]], {"enabled": True}, {"enabled": "yes"}, {"stage": "2"}),
)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value below `node`."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from places(value)


def damage_tree(content: dict[str, Any], chance: random.Random) -> None:
    """Drop, rename, retype, nest, swap or add one thing."""
    found = list(places(content))
    if not found:
        content["a"] = 1
        return
    node, key = chance.choice(found)
    kind = chance.choice(("drop", "rename", "retype", "retype", "retype", "nest", "swap", "add"))
    if kind == "drop":
        del node[key]
    elif kind == "rename" and isinstance(node, dict):
        node[str(key)[:-1] + chance.choice(("", "x", "é"))] = node.pop(key)
    elif kind == "nest":
        node[key] = chance.choice(([node[key]], {"a": node[key]}, {str(key): node[key]}))
    elif kind == "swap":
        other, other_key = chance.choice(found)
        if other_key in other if isinstance(other, dict) else other_key < len(other):
            node[key] = copy.deepcopy(other[other_key])
    elif kind == "add" and isinstance(node, dict):
        name = chance.choice(("", "a", "stage", "enabled", "params", "vocab_size", "pruned_heads"))
        node[name] = copy.deepcopy(chance.choice(VALUES))
    else:
        node[key] = copy.deepcopy(chance.choice(VALUES))


def damage_text(text: bytes, chance: random.Random) -> bytes:
    """Truncate, flip, double or insert something."""
    place = chance.randrange(len(text) + 1)
    kind = chance.choice(("cut", "flip", "double", "insert", "repeat"))
    if kind == "cut":
        return text[:place]
    if kind == "flip":
        return text[:place] + bytes([chance.randrange(256)]) + text[place + 1 :]
    if kind == "double":
        return text + text
    if kind == "repeat":  # sometimes a key
        lines = text.split(b"\n")
        line = chance.randrange(len(lines))
        return b"\n".join([*lines[: line + 1], *lines[line:]])
    inserted = chance.choice(
        (b"NaN", b"-Infinity", b"1e999", b"\xff", b"\x00", b"{" * 50, b"[" * 3000, b"//", b"9" * 5000)
    )
    return text[:place] + inserted + text[place:]


def damaged(name: str, chance: random.Random) -> bytes:
    content = json.loads((PROJECT / name).read_text())
    if "bert_token_file" in content:
        content["bert_token_file"] = "bert-base-uncased"  # whose size is known: no tokenizer is needed
    if chance.random() < 0.3:
        return damage_text(json.dumps(content, indent=1).encode(), chance)
    for _ in range(chance.choice((1, 1, 2, 4))):
        damage_tree(content, chance)
    return json.dumps(content, indent=1).encode()


def outcome(folder: Path) -> str:
    """Whether a run with both files would be refused, up to the engine."""
    words = ["--cf", f"{folder}/model.json", "--deepspeed_config", f"{folder}/engine.json"]
    words += ["--output_dir", f"{folder}/out", "--data_path_prefix", str(folder), "--max_seq_length", "128"]
    try:
        settings = resolve_settings(read_arguments(words)[0], RankInfo(0, 0, 1, 1))
    except UserError:
        return "refused"
    schedule = settings.schedule(0)
    assert all(schedule.rate(step) >= 0 for step in (0, 1, 1000, 10**6))
    json.dumps(settings.model_config.to_dict())
    assert settings.deepspeed.for_engine(settings.precision)["train_batch_size"] == settings.deepspeed.batch.total
    return "settings"


@pytest.mark.parametrize("name", [*MODELS, *ENGINES])
def test_damaged_files_give_settings_or_one_message(tmp_path: Path, name: str) -> None:
    chance = random.Random(f"seed of {name}")
    is_model = name in MODELS
    intact = json.loads((PROJECT / (name if is_model else "configs/bert_tiny.json")).read_text())
    for folders in intact["data"]["mixed_seq_datasets"].values():
        for folder in folders.values():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    counts = {"refused": 0, "settings": 0}
    for number in range(ROUNDS):
        other = "configs/ds_cpu.json" if is_model else "configs/bert_tiny.json"
        whole = json.loads((PROJECT / other).read_text())
        if not is_model:
            whole["bert_token_file"] = "bert-base-uncased"
        content = damaged(name, chance)
        (tmp_path / "model.json").write_bytes(content if is_model else json.dumps(whole).encode())
        (tmp_path / "engine.json").write_bytes(json.dumps(whole).encode() if is_model else content)
        try:
            counts[outcome(tmp_path)] += 1
        except Exception as error:
            raise AssertionError(f"round {number}: {error!r} on\n{content[:3000]!r}") from error
    assert not (tmp_path / "out").exists()
    assert min(counts.values()) > ROUNDS // 50, counts  # neither everything nor nothing is refused
