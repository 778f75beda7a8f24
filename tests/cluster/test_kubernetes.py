"""The manifest of docs/clusters.md against the schema that Kubernetes publishes."""

from typing import Any

import pytest

from tests.unit.training.test_clusters_page import read_manifest


@pytest.fixture
def schema() -> Any:
    return pytest.importorskip("kubernetes_validate")


def test_the_manifest_is_valid(schema: Any) -> None:
    for part in read_manifest():
        schema.validate(part, schema.latest_version(), strict=True)


def test_a_misspelt_field_is_not(schema: Any) -> None:
    _, job = read_manifest()
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["torchrun"]
    with pytest.raises(schema.ValidationError, match="'comand' was unexpected"):
        schema.validate(job, schema.latest_version(), strict=True)
