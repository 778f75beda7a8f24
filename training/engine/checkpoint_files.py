"""How DeepSpeed's checkpoint files are written and read: flushed to disk, and read without running code in them."""

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from common.errors import UserError

# All that DeepSpeed's files contain besides tensors and plain containers.
ALLOWED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    DynamicLossScaler,
    LossScaler,
    ZeroStageEnum,
    fragment_address,
]


def read_file(path: Path, is_mapped: bool = True) -> Any:
    """The content of a .pt file of a checkpoint. Refuses anything but tensors, containers and ALLOWED.

    `is_mapped`: tensors are memory-mapped, so a large checkpoint is never completely in memory.
    """
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: is refused: it contains more than tensors and DeepSpeed's own records, and loading it could run "
            f"untrusted code ({reason}). Use a checkpoint that this project wrote"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Use another checkpoint") from None


class CheckedFiles(TorchCheckpointEngine):
    """Replaces DeepSpeed's own reader and writer.

    A failed write is stored in `failure` instead of raised: the other ranks are about to enter a barrier inside
    DeepSpeed and would wait there forever. The caller of save_checkpoint() asks all ranks afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: OSError | None = None
        self.written: list[tuple[str, int]] = []  # names and sizes since the last take_outcome()

    def save(self, state_dict: Any, path: str) -> None:
        try:
            with Path(path).open("wb") as stream:
                torch.save(state_dict, stream)
                stream.flush()
                os.fsync(stream.fileno())
                self.written.append((Path(path).name, os.fstat(stream.fileno()).st_size))
        except OSError as error:
            self._give_up(path, error)
        except RuntimeError as error:  # torch's writer wraps the error of the stream
            if not isinstance(error.__context__, OSError):
                raise
            self._give_up(path, error.__context__)

    def _give_up(self, path: str, error: OSError) -> None:
        self.failure = error
        with suppress(OSError):
            Path(path).unlink()

    def load(self, path: str, map_location: Any = None) -> Any:
        # Not mapped: DeepSpeed keeps some of the tensors, which must not depend on the file.
        return read_file(Path(path), is_mapped=False)

    def take_outcome(self) -> tuple[list[tuple[str, int]], OSError | None]:
        """Names and sizes of the files written since the last call, and the error of a failed write or None."""
        written, failure = self.written, self.failure
        self.written, self.failure = [], None
        return written, failure
