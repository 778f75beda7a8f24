"""The rooms of docs/architecture.md: who may import whom, who may import DeepSpeed, and how long a file may be."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support import PROJECT

MAX_LINES = 400
FILES_HEADING = "## Every file\n"
PACKAGES = ("common", "nvidia", "data", "evaluation", "training")
# Lowest first. A room imports from itself and from the rooms on lower lines; rooms on one line do not know each other.
# A package's own name stands for the files directly in it.
LAYERS = (
    ("common",),
    ("nvidia.cpu", "data.tokenizer", "data.randomness"),
    ("nvidia.attention", "data.shards"),
    ("nvidia", "data.text", "data.masking", "data.instances"),
    ("data.preparation", "data.stream"),
    ("nvidia.interop", "data"),
    ("evaluation.tasks", "evaluation.pseudo_likelihood"),
    ("evaluation.scoring", "evaluation.finetuning"),
    ("evaluation",),
    ("training.runtime", "training.plan", "training.optimizers"),
    ("training.metrics",),
    ("training.engine",),
    ("training.settings",),
    ("training.inputs",),
    ("training.checkpoints",),
    ("training.export",),
    ("training.faults", "training.planning"),
    ("training",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# Files directly in a package that lie below its rooms instead of above them.
LEAVES = {
    "nvidia.activations": "nvidia.cpu",
    "nvidia.unpadding": "nvidia.cpu",
    "nvidia.checkpointing": "nvidia.cpu",
    **dict.fromkeys(("data.special_tokens", "data.tokenizer", "data.tokenizer_training"), "data.tokenizer"),
    **{name: name for name in ("data.masking", "data.randomness")},
}
DEEPSPEED_ROOMS = ("training.engine", "training.checkpoints", "training.runtime")
APART = (("nvidia", "data"), ("data", "nvidia"))  # packages that know nothing of each other


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((PROJECT / package).rglob("*.py"))]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sources()}


def room_of(module: str) -> str:
    if module in LEAVES:
        return LEAVES[module]
    if MODULES[module].name == "__init__.py":
        return module
    return module.rsplit(".", 1)[0]


@cache
def imported_names(path: Path) -> list[str]:
    """Every module that a file imports, also inside functions and under TYPE_CHECKING."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return names


def own_imports(path: Path) -> Iterator[str]:
    """Modules of this project that a file imports."""
    for name in imported_names(path):
        module = name if name in MODULES else name.rsplit(".", 1)[0]
        if module in MODULES:
            yield module


def test_every_import_of_the_project_exists() -> None:
    """mypy ignores modules that it cannot find, so it would not report one of ours."""
    wrong = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name in imported_names(path)
        if name.split(".")[0] in PACKAGES and name not in MODULES and name.rsplit(".", 1)[0] not in MODULES
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_has_a_layer() -> None:
    assert {room_of(module) for module in MODULES} <= set(LEVEL)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down(package: str) -> None:
    wrong = []
    for module, path in MODULES.items():
        if module.split(".")[0] != package:
            continue
        room = room_of(module)
        for other in own_imports(path):
            target = room_of(other)
            is_apart = (package, other.split(".")[0]) in APART
            if target != room and (LEVEL[target] >= LEVEL[room] or is_apart):
                wrong.append(f"{module} ({room}) imports {other} ({target})")
    assert not wrong, "\n".join(wrong)


def test_no_import_leads_back() -> None:
    """Not even inside a room, or inside a function."""
    graph = {module: {*own_imports(path)} - {module} for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules


def test_only_some_rooms_know_deepspeed() -> None:
    wrong = [
        module
        for module, path in MODULES.items()
        if room_of(module) not in DEEPSPEED_ROOMS
        and any(name.split(".")[0] == "deepspeed" for name in imported_names(path))
    ]
    assert not wrong


def test_no_file_writes_into_what_it_imports() -> None:
    """Neither a module of this project nor an object of one gets its attributes set from outside."""
    wrong = []
    for path in [*sources(), *sorted((PROJECT / "scripts").glob("*.py")), PROJECT / "deepspeed_train.py"]:
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = {alias.asname or alias.name for node in imports for alias in node.names if _is_ours(node)}
        for node in ast.walk(tree):
            is_written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
            if is_written and isinstance(node.value, ast.Name) and node.value.id in names:
                wrong.append(f"{path.relative_to(PROJECT)}:{node.lineno} sets {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def _is_ours(node: ast.ImportFrom) -> bool:
    return (node.module or "").split(".")[0] in PACKAGES


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(PROJECT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_the_page_lists_every_room() -> None:
    """docs/architecture.md has a line for each folder with code, and for no folder that is not there."""
    page = (PROJECT / "docs" / "architecture.md").read_text()
    folders = {f"{path.parent.relative_to(PROJECT)}/" for path in sources() if path.parent.parent != PROJECT}
    assert {folder for folder in folders if f"`{folder}`" not in page} == set()


def list_files() -> str:
    """The end of docs/architecture.md: each file with the first line of its docstring."""
    folder, lines = None, []
    paths = sorted(sources(), key=lambda path: (PACKAGES.index(module_of(path).split(".")[0]), path.parent, path.name))
    for path in (*paths, *sorted((PROJECT / "scripts").glob("*.py"))):
        if path.name == "__init__.py":
            continue
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"**{folder.relative_to(PROJECT)}/**", ""]
        lines.append(f"- `{path.name}`: {first}")
    return "\n".join(lines)


def test_the_page_ends_with_every_file() -> None:
    """Where it differs: `python -m tests.unit.test_architecture` writes it anew."""
    page = (PROJECT / "docs" / "architecture.md").read_text()
    assert page.partition(FILES_HEADING)[2].strip() == list_files().strip()


if __name__ == "__main__":
    page = PROJECT / "docs" / "architecture.md"
    page.write_text(page.read_text().partition(FILES_HEADING)[0] + FILES_HEADING + "\n" + list_files() + "\n")
