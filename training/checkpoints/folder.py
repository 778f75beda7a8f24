"""The checkpoints in a run's folder: which there are, which is the newest valid one, and which one a user asked for.

A checkpoint is a folder with a valid manifest. DeepSpeed's tools read the same layout:
`<saved_models>/<job_name>/{latest,<tag>/…}`.
"""

from pathlib import Path

from common.console import console
from common.errors import UserError
from common.weights import WEIGHTS
from training.checkpoints.manifest import find_damage
from training.checkpoints.paths import DAMAGED, MANIFEST, TAG, is_run_tag, step_of
from training.checkpoints.retention import Best, read_best

RUN_FOLDER_HINT = "Pass a run's <output_dir>/saved_models/<job_name> that contains complete checkpoints"


class CheckpointFolder:
    """The checkpoints of one run: `<output_dir>/saved_models/<job_name>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.valid: set[str] = set()  # tags that this process has verified or written
        self.damaged: set[str] = set()  # tags that this process has skipped; retention does not count them

    def tags(self) -> list[str]:
        """Tags of the folders that have a manifest, oldest step first."""
        if not self.folder.is_dir():
            return []
        found = [
            path
            for path in self.folder.iterdir()
            if not path.is_symlink()
            and TAG.fullmatch(path.name)
            and not path.name.endswith(DAMAGED)
            and (path / MANIFEST).is_file()
        ]
        return [path.name for path in sorted(found, key=lambda path: (step_of(path.name), path.name))]

    def incomplete(self) -> list[str]:
        """Names of folders that are named like a run's checkpoints but have no manifest."""
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir() if not (path / MANIFEST).is_file()]
        return [name for name in names if is_run_tag(name)]

    def newest_valid(self, before_step: int | None = None) -> str | None:
        """The newest checkpoint that passes its manifest, or None; skipped ones are reported with the reason.

        Copies under other names belong to the user and are not considered.
        """
        named = [tag for tag in self.tags() if is_run_tag(tag)]
        for tag in sorted([*named, *self.incomplete()], key=lambda tag: (step_of(tag), tag), reverse=True):
            if before_step is not None and step_of(tag) >= before_step:
                continue
            problem = find_damage(self.folder / tag)
            if problem is None:
                self.valid.add(tag)
                return tag
            self.valid.discard(tag)
            self.damaged.add(tag)
            console.warn(f"{self.folder / tag}: skipped, {problem}")
        return None

    def newest_known_valid(self) -> str | None:
        """The newest checkpoint that this process has verified or written. Reads no large file."""
        return next((tag for tag in reversed(self.tags()) if tag in self.valid), None)

    def best(self) -> Best | None:
        """The checkpoint that best.json names, if it exists."""
        return read_best(self.folder, self.tags())

    def choose(self, tag: str | None) -> str:
        """The checkpoint that a user asked for (None: the newest valid one); UserError if it is not valid."""
        self.check_exists()
        if tag is None:
            newest = self.newest_valid()
            if newest is None:
                raise UserError(f"{self.folder}: contains no complete checkpoint named step_N. {self._remedy()}")
            return newest
        if not TAG.fullmatch(tag) or tag not in self.tags():
            known = ", ".join(self.tags()) or "none"
            raise UserError(
                f"{self.folder}: has no checkpoint {tag!r} (found: {known}). Pass one of them with --load_checkpoint_id"
            )
        problem = find_damage(self.folder / tag)
        if problem is not None:
            raise UserError(
                f"{self.folder / tag}: is not valid: {problem}. Choose another checkpoint (--load_checkpoint_id, or "
                f"export_hf.py --checkpoint)"
            )
        return tag

    def check_exists(self) -> None:
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder. {RUN_FOLDER_HINT}")

    def _remedy(self) -> str:
        """What to pass instead, if the folder is something else that this project writes."""
        if (self.folder / MANIFEST).is_file():
            return f"It is a checkpoint itself: pass {self.folder.parent} and --load_checkpoint_id {self.folder.name}"
        if (self.folder / WEIGHTS).is_file():
            return "It is a Hugging Face folder, not a run's; a run starts from its weights with --use_pretrain"
        return RUN_FOLDER_HINT
