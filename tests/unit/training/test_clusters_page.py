"""docs/clusters.md: its flags exist, the fields of its Kubernetes manifest too, and the parts of that match.

tests/cluster runs its commands.
"""

import re
import shlex
from typing import Any

import pytest
import yaml

from tests.support import PROJECT
from training.settings.flags import read_arguments

# Fields that the manifest may use, from the API reference of Kubernetes (v1 and batch/v1): a type, another object, or a
# list of objects. Fields that the API requires are in REQUIRED.
OBJECTS: dict[str, dict[str, Any]] = {
    "Service": {"apiVersion": str, "kind": str, "metadata": "Metadata", "spec": "ServiceSpec"},
    "ServiceSpec": {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": dict},
    "Job": {"apiVersion": str, "kind": str, "metadata": "Metadata", "spec": "JobSpec"},
    "JobSpec": {
        "completions": int,
        "parallelism": int,
        "completionMode": str,
        "backoffLimit": int,
        "template": "PodTemplate",
    },
    "Metadata": {"name": str},
    "PodTemplate": {"metadata": "Metadata", "spec": "PodSpec"},
    "PodSpec": {
        "subdomain": str,
        "restartPolicy": str,
        "terminationGracePeriodSeconds": int,
        "containers": ["Container"],
        "volumes": ["Volume"],
    },
    "Container": {
        "name": str,
        "image": str,
        "workingDir": str,
        "command": [str],
        "args": [str],
        "env": ["Variable"],
        "resources": "Resources",
        "volumeMounts": ["Mount"],
    },
    "Variable": {"name": str, "value": str},
    "Resources": {"limits": dict, "requests": dict},
    "Mount": {"name": str, "mountPath": str},
    "Volume": {"name": str, "persistentVolumeClaim": "Claim", "emptyDir": "EmptyDir"},
    "Claim": {"claimName": str},
    "EmptyDir": {"medium": str},
}
REQUIRED = {
    "JobSpec": ["template"],
    "PodSpec": ["containers", "restartPolicy"],  # a Job accepts no default
    "Container": ["name", "image"],
    "Variable": ["name"],
    "Mount": ["name", "mountPath"],
    "Volume": ["name"],
    "Claim": ["claimName"],
}


def find_mistakes(value: Any, kind: Any, place: str) -> list[str]:
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{place}: not a list"]
        return [text for index, item in enumerate(value) for text in find_mistakes(item, kind[0], f"{place}[{index}]")]
    if not isinstance(kind, str):
        return [] if type(value) is kind else [f"{place}: not of type {kind.__name__}"]
    if not isinstance(value, dict):
        return [f"{place}: not an object"]
    missing = [f"{place}.{name}: missing" for name in REQUIRED.get(kind, []) if name not in value]
    fields = OBJECTS[kind]
    unknown = [f"{place}.{name}: unknown" for name in value if name not in fields]
    known = [(name, item) for name, item in value.items() if name in fields]
    return missing + unknown + [text for name, item in known for text in find_mistakes(item, fields[name], name)]


def read_manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    text = (PROJECT / "docs" / "clusters.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    service, job = yaml.safe_load_all(block)
    return service, job


def test_the_fields() -> None:
    service, job = read_manifest()
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert find_mistakes(service, "Service", "Service") + find_mistakes(job, "Job", "Job") == []


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ({"comand": ["torchrun"]}, "containers[0].comand: unknown"),
        ({"env": [{"name": "A", "value": 1}]}, "value: not of type str"),
        ({"args": "--nnodes=2"}, "args: not a list"),
        ({"volumeMounts": [{"name": "shm"}]}, "volumeMounts[0].mountPath: missing"),
    ],
)
def test_mistakes_are_found(change: dict[str, Any], mistake: str) -> None:
    _, job = read_manifest()
    job["spec"]["template"]["spec"]["containers"][0].update(change)
    assert find_mistakes(job, "Job", "Job") == [mistake]


def test_the_parts_match() -> None:
    """A pod finds the first one by name, mounts volumes that exist, and there are as many as torchrun expects."""
    service, job = read_manifest()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(word.removeprefix("--").split("=") for word in container["args"] if "=" in word)
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options["rdzv-endpoint"].startswith(f"{name}-0.{pod['subdomain']}:")
    assert job["spec"]["completionMode"] == "Indexed", "otherwise pods have no names"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(options["nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options["nproc_per_node"])
    assert pod["restartPolicy"] in ("OnFailure", "Never")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_flags() -> None:
    (container,) = read_manifest()[1]["spec"]["template"]["spec"]["containers"]
    flags = [flags_of(container["args"], "deepspeed_train.py")]
    page = re.sub(r"```.*?```", "", (PROJECT / "docs" / "clusters.md").read_text(), flags=re.DOTALL)
    for script in ("deepspeed_train.py", "scripts/slurm.sh"):
        lines = [line for line in page.splitlines() if line.startswith("    ") and f" {script} --" in line]
        flags += [flags_of(shlex.split(line), script) for line in lines]
    assert len(flags) == 6
    for words in flags:
        assert read_arguments(words)[1].messages == []


def flags_of(words: list[str], script: str) -> list[str]:
    return words[words.index(script) + 1 :]
