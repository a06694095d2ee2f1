"""Folders that are written as a whole or not at all, whatever a killed process left behind."""

import pytest

from specrl_jax.models.folders import replaced_folder

pytestmark = pytest.mark.ci


def _write(folder, text):
    with replaced_folder(folder) as fresh:
        (fresh / "a").write_text(text)


def _names(folder):
    return sorted(path.name for path in folder.parent.iterdir())


def test_a_folder_is_replaced_whole(tmp_path):
    folder = tmp_path / "deep" / "policy"
    _write(folder, "one")
    (folder / "b").touch()
    _write(folder, "two")
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert (folder / "a").read_text() == "two"
    assert _names(folder) == ["policy"]


def test_an_exception_changes_nothing(tmp_path):
    folder = tmp_path / "policy"
    _write(folder, "one")
    with pytest.raises(IsADirectoryError), replaced_folder(folder) as fresh:
        fresh.write_text("two")
    assert (folder / "a").read_text() == "one"
    assert _names(folder) == ["policy"]


@pytest.mark.parametrize("killed", ["while writing", "between the two renames", "before the old one went"])
def test_what_a_killed_process_left_is_cleared(tmp_path, killed):
    folder, fresh, old = (tmp_path / name for name in ("policy", ".policy.new", ".policy.old"))
    _write(folder, "one")
    if killed == "while writing":
        fresh.mkdir()
        (fresh / "half").touch()
    else:
        folder.rename(old)
        if killed == "before the old one went":
            _write(tmp_path / "other", "two")
            (tmp_path / "other").rename(folder)
    # Even if the next attempt fails too, a whole folder stands in its place.
    with pytest.raises(KeyboardInterrupt), replaced_folder(folder):
        raise KeyboardInterrupt
    assert (folder / "a").read_text() == ("two" if killed == "before the old one went" else "one")
    _write(folder, "three")
    assert (folder / "a").read_text() == "three"
    assert _names(folder) == ["policy"]
