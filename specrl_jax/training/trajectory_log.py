"""The tokens of a run on disk, and their hash.

Per sequence in (step, row id, sample) order: int32 little-endian length, then the
tokens. Two runs that emitted the same tokens have the same file, byte for byte.
"""

import hashlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from specrl_jax.rollout.trajectory import Trajectory

TRAJECTORY_FILE = "trajectories.bin"


def sequence_bytes(trajectory: Trajectory) -> bytes:
    """The sequences of one step, on the host, as they stand in the file."""
    row_ids = np.asarray(trajectory.prompts.row_ids)
    tokens, lengths = np.asarray(trajectory.tokens), np.asarray(trajectory.lengths)
    samples = len(lengths) // len(row_ids)
    rows = (np.argsort(row_ids, kind="stable")[:, None] * samples + np.arange(samples)).reshape(-1)
    parts = (np.concatenate([lengths[i : i + 1], tokens[i, : lengths[i]]]).astype("<i4").tobytes() for i in rows)
    return b"".join(parts)


class TrajectoryLog:
    """Appends steps to a run's file; `size` is what a checkpoint remembers to resume from."""

    def __init__(self, folder: Path, resume_size: int = 0) -> None:
        self._path = folder / TRAJECTORY_FILE
        self._path.touch()
        self._file: BinaryIO = self._path.open("r+b")
        self._file.truncate(resume_size)
        self._file.seek(resume_size)

    def append(self, trajectory: Trajectory) -> None:
        """Write the sequences of one step."""
        self._file.write(sequence_bytes(trajectory))
        self._file.flush()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def __enter__(self) -> "TrajectoryLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def close(self) -> str:
        """Close the file and return its SHA-256."""
        self._file.close()
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
