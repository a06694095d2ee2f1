"""Notebooks are kept without outputs, and run from top to bottom at their smallest preset."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.ci
ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _read(path):
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["draft_init", "draft_length", "tour"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_no_outputs(path):
    for cell in _read(path).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPECRL_PRESET": "smoke"}
    env.pop("SPECRL_RUN", None)
    client = NotebookClient(_read(path), timeout=1800, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute(env=env)
    assert all(cell.execution_count for cell in client.nb.cells if cell.cell_type == "code")
