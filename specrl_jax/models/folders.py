"""Folders that are written as a whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside `folder` to write to; it takes the place of `folder` at the end.

    Parents are made. After an exception inside the block nothing has changed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (folder.with_name(f".{folder.name}.{suffix}-{os.getpid()}") for suffix in ("new", "old"))
    fresh.mkdir()
    try:
        yield fresh
    except BaseException:
        shutil.rmtree(fresh)
        raise
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    if old.exists():
        shutil.rmtree(old)
