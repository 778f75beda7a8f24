"""The Kubernetes manifest of docs/clusters.md follows the schema of its kinds, and its flags exist."""

import re

import pytest
import yaml

from tests.support import PROJECT
from training.settings.flags import read_arguments


def read_manifest() -> list[dict]:
    text = (PROJECT / "docs" / "clusters.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    return list(yaml.safe_load_all(block))


def test_the_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="not installed: pip install kubernetes-validate")
    manifest = read_manifest()
    assert [part["kind"] for part in manifest] == ["Service", "Job"]
    for part in manifest:
        validate.validate(part, "1.29", strict=True)


def test_the_flags() -> None:
    (container,) = read_manifest()[1]["spec"]["template"]["spec"]["containers"]
    words = container["args"]
    _, problems = read_arguments(words[words.index("deepspeed_train.py") + 1 :])
    assert problems.messages == []
