"""Files of numbers: one JSON object per training step, whole JSON files, TensorBoard and wandb.

JSON has no NaN and no infinity; both are written as null.
"""

import importlib
import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from specrl_jax.errors import InputError

METRICS_FILE = "metrics.jsonl"


def to_json(value: Any) -> Any:
    """`value` with arrays and scalars of JAX and NumPy as plain numbers and lists, and NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"{type(value).__name__} has no JSON form")
    # bfloat16 is no Python number; float32 holds it exactly.
    plain = array if array.dtype.kind in "biufU" else array.astype(np.float32)
    return to_json(plain.tolist())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that it is seen whole or not at all."""
    _replace(path, json.dumps(to_json(value), indent=2, allow_nan=False) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of `folder`/metrics.jsonl; none when there is no file.

    A last line that a killed run left unfinished is skipped.

    Raises:
        InputError: another line is no JSON object.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # What follows the last newline is empty, or was cut off.
    return [_parse_row(path, number, line) for number, line in enumerate(lines[:-1], start=1)]


class MetricsWriter:
    """Appends one row per step to `folder`/metrics.jsonl, and to TensorBoard and wandb on request.

    Each row is on its way to the disk when `write` returns. A resumed run drops the rows
    that come after its checkpoint; it writes them again.

    Args:
        folder: the run's folder, which exists.
        resume_step: first step that a resumed run does again; rows whose `step` is at least
            that go. None starts a new file.
        tensorboard: also write event files to `folder`/tensorboard.
        wandb: also report to Weights & Biases; files go to `folder`/wandb.

    Raises:
        InputError: tensorboardX or wandb was asked for but is not installed.
    """

    def __init__(
        self, folder: Path, *, resume_step: int | None = None, tensorboard: bool = False, wandb: bool = False
    ) -> None:
        check_reporters(tensorboard=tensorboard, wandb=wandb)
        self._tensorboard = _open_tensorboard(folder, resume_step) if tensorboard else None
        self._wandb = _open_wandb(folder, resume_step) if wandb else None
        path = folder / METRICS_FILE
        rows = [] if resume_step is None else [row for row in read_metrics(folder) if row["step"] < resume_step]
        _replace(path, "".join(_row_line(row) for row in rows))
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the row of one step; `metrics` holds numbers, strings, lists and arrays."""
        row = to_json({"step": step, **metrics})
        self._file.write(_row_line(row))
        self._file.flush()
        if self._tensorboard is not None:
            for name, number in _scalars(row).items():
                self._tensorboard.add_scalar(name, number, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(_scalars(row), step=step)

    def close(self) -> None:
        """Finish all files."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _row_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _parse_row(path: Path, number: int, line: str) -> dict[str, Any]:
    remedy = "delete that line or start a new run"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} line {number} is not JSON ({error.msg}); {remedy}") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise InputError(f'{path} line {number} is no object with a whole number "step"; {remedy}')
    return row


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row; entry `i` of a list becomes `name/i`."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        entries = {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
        flat |= {key: v for key, v in entries.items() if isinstance(v, int | float) and key != "step"}
    return flat


def check_reporters(*, tensorboard: bool, wandb: bool) -> None:
    """Raise InputError where a package that is asked for is not installed."""
    for wanted, flag, package in ((tensorboard, "tensorboard", "tensorboardX"), (wandb, "wandb", "wandb")):
        if not wanted:
            continue
        try:
            importlib.import_module(package)
        except ImportError:
            raise InputError(f'--{flag} needs {package}, which is not installed; run pip install ".[{flag}]"') from None


def _open_tensorboard(folder: Path, resume_step: int | None) -> Any:
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step)


def _open_wandb(folder: Path, resume_step: int | None) -> Any:
    import wandb

    # The same id continues the same page after a resume.
    id_file = folder / "wandb_id"
    if resume_step is None or not id_file.exists():
        _replace(id_file, uuid.uuid4().hex + "\n")
    return wandb.init(
        project="specrl_jax", name=folder.name, dir=str(folder), id=id_file.read_text().strip(), resume="allow"
    )
