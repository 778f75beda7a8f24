"""Our files damaged at random: reading them gives a consistent state or a UserError."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from common.errors import UserError
from nvidia.cpu.libraries import Libraries
from tests.unit.training.test_json_fuzz import damage_text, damage_tree
from training.checkpoints.manifest import find_damage, write_manifest
from training.checkpoints.paths import MANIFEST, STATE
from training.checkpoints.state import TrainingState, read_best, read_skips, read_state
from training.metrics.reader import read_valid_lines
from training.metrics.sinks import remove_later_lines

ROUNDS = 150
GOOD = TrainingState(
    step=12,
    start_step=4,
    samples=96,
    tokens=4000,
    seed=42,
    world_size=2,
    zero_stage=1,
    precision="fp32",
    data_digest="ab" * 32,
    tokenizer_digest=None,
    best_validation_loss=2.5,
    model_config={"hidden_size": 32, "layers": [1, 2]},
    is_preln=True,
    seconds=3.5,
    skips=((8, 16), (24, 32)),
    rollbacks=((24, 32),),
    recipe={"learning_rate": 0.1},
    data_summary="64 rows in 3 files",
    best_tag="step_00000008",
    processor="AMD EPYC, AVX512, features 01234567",
    cpu_libraries=Libraries(forward="onednn"),
)


def damaged(content: object, chance: random.Random) -> bytes:
    tree = json.loads(json.dumps(content))
    if chance.random() < 0.4:
        return damage_text(json.dumps(tree, indent=1).encode(), chance)
    for _ in range(chance.choice((1, 1, 2))):
        damage_tree(tree, chance)
    return json.dumps(tree).encode()


def test_a_good_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text(json.dumps(asdict(GOOD)))
    assert read_state(tmp_path) == GOOD


def test_damaged_states(tmp_path: Path) -> None:
    chance, counts = random.Random(1), {"refused": 0, "read": 0}
    for number in range(ROUNDS):
        content = damaged(asdict(GOOD), chance)
        (tmp_path / STATE).write_bytes(content)
        try:
            state = read_state(tmp_path)
        except UserError as error:
            counts["refused"] += STATE in str(error)
        except Exception as error:
            raise AssertionError(f"round {number}: {error!r} on\n{content[:3000]!r}") from error
        else:
            counts["read"] += 1
            assert 0 <= state.start_step <= state.step < 2**63
            assert all(0 <= first < end for first, end in state.skips)
            json.dumps(asdict(state), allow_nan=False)
    assert sum(counts.values()) == ROUNDS
    assert min(counts.values()) > ROUNDS // 20, counts


def test_damaged_manifests_states_and_pointers_raise_nothing_else(tmp_path: Path) -> None:
    chance = random.Random(2)
    (tmp_path / STATE).write_text(json.dumps(asdict(GOOD)))
    write_manifest(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    best = {"tag": "step_00000008", "mlm_loss": 2.5, "is_only_best": False}
    for number in range(ROUNDS):
        (tmp_path / STATE).write_text(json.dumps(asdict(GOOD)))
        (tmp_path / MANIFEST).write_text(json.dumps(manifest))
        name, content = (MANIFEST, manifest) if number % 2 else (STATE, asdict(GOOD))
        (tmp_path / name).write_bytes(damaged(content, chance))
        assert isinstance(find_damage(tmp_path), str)  # it holds no file of any rank
        (tmp_path / "best.json").write_bytes(damaged(best, chance))
        read_best(tmp_path, ["step_00000008"])


@pytest.mark.parametrize(
    "text", ["[[1]]", "[[2, 1]]", "[[1, 2.5]]", "{}", "7", "[[true, 2]]", "[" * 5000, "[[1, 1e999]]"]
)
def test_invalid_ranges(text: str, tmp_path: Path) -> None:
    (tmp_path / "skips.json").write_text(text)
    with pytest.raises(UserError, match="remove it to skip only the samples"):
        read_skips(tmp_path)


def test_damaged_metrics(tmp_path: Path) -> None:
    chance, path = random.Random(3), tmp_path / "metrics.jsonl"
    rows = [json.dumps({"kind": "train", "step": step, "samples": 8 * step, "loss": 1.0}) for step in range(20)]
    for _ in range(ROUNDS):
        lines = [damage_text(row.encode(), chance) if chance.random() < 0.2 else row.encode() for row in rows]
        path.write_bytes(b"\n".join([*lines, b"[1]", b"null", b'{"step": null}', b"\xff\xfe", b"[" * 100_000, b""]))
        remove_later_lines(path, 10, 80)
        kept = read_valid_lines(path)
        assert all(row.get("step", 0) <= 10 for row in kept)
        assert len(kept) >= 3
