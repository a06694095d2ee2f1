"""Folders that are written as a whole or not at all."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside `folder` to write to; it takes the place of `folder` at the end.

    Parents are made. After an exception inside the block nothing has changed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("new", "old"))
    # What a killed process left: a half-written folder, and a finished one on its way aside.
    shutil.rmtree(fresh, ignore_errors=True)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
    except BaseException:
        shutil.rmtree(fresh)
        raise
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
