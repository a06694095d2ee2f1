"""The output folder of a run: opened without losing anything, and its tables of results."""

import dataclasses
import fnmatch
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from experiments.common import RunOptions
from specrl_jax.errors import InputError
from specrl_jax.parallel.hosts import HOSTS_FOLDER, is_first, own_folder, wait_for_all
from specrl_jax.training.metrics import METRICS_FILE, to_json, write_json
from specrl_jax.training.trajectory_log import TRAJECTORY_FILE

CONFIG_FILE = "config.json"

# Everything that a run writes into its folder; `*` stays within one name.
_MODELS = ("warmup", "policy", "policy_best", "drafter")
# While one is replaced, its old and new files lie beside it.
_MODEL_FOLDERS = (*_MODELS, *(f".{name}.{suffix}" for name in _MODELS for suffix in ("new", "old")))
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")
RUN_FILES = (
    CONFIG_FILE,
    METRICS_FILE,
    TRAJECTORY_FILE,
    "summary.json",
    "results.json",
    "results.md",
    "samples.txt",
    "costs.json",
    "wandb_id",
    "*.tmp",
    "*.png",
    *(f"{folder}/{name}" for folder in _MODEL_FOLDERS for name in _MODEL_FILES),
)
# Folders whose whole content is written by a library, or by runs that a table is made of.
RUN_TREES = ("checkpoints", "tensorboard", "wandb", "profile", "arms", HOSTS_FOLDER)
# Runs within the run.
RUN_FOLDERS = ("baseline",)

# Options that change nothing about the run itself.
_RUN_MAY_CHANGE = ("out", "preset", "resume", "overwrite", "coordinator", "processes", "process")
_RESUME_MAY_CHANGE = (*(f"run.{name}" for name in _RUN_MAY_CHANGE), "profile", "tensorboard", "wandb")


def check_output(run: RunOptions, script: str, **inputs: str | None) -> None:
    """Refuse an output folder before any work is done; changes nothing on disk.

    Args:
        run: the options of the run.
        script: name of the script.
        inputs: by name of the option, folders and files (or hub names) that the run reads.

    Raises:
        InputError: the folder holds a run and neither --resume nor --overwrite was given, or a run of another
            script, or files that no run made, or no run to resume, or --overwrite would delete an input,
            or the folder cannot be written.
    """
    out = run.out
    _check_writable(out)
    holds_run = (out / CONFIG_FILE).is_file()
    if holds_run:
        owner = _read_config(out).get("script", script)
        if owner != script:
            raise InputError(f"--out {out} holds a run of {owner}, not of {script}; choose another folder")
    if run.resume:
        if not holds_run:
            raise InputError(f"--resume: {out} holds no run; leave --resume out to start one")
        return
    if holds_run and not run.overwrite:
        raise InputError(
            f"--out {out} already holds a run; continue it with --resume, replace it with --overwrite, "
            "or choose another folder"
        )
    for name, given in inputs.items():
        path = Path(given or "").expanduser()
        if given and path.exists() and path.resolve().is_relative_to(out.resolve()):
            raise InputError(
                f"--{name.replace('_', '-')} {given} lies in --out {out}, which --overwrite deletes; "
                "choose another --out"
            )
    foreign = next(_foreign_files(out), None) if holds_run else next(_entries(out), None)
    if foreign is not None:
        raise InputError(f"--out {out} holds {foreign.relative_to(out)}, which no run made; choose another folder")


def open_output(run: RunOptions, config: Any, script: str, may_change: Collection[str] = ()) -> Path:
    """Make the output folder ready and write `config` to its config.json.

    Call it after every other check: --overwrite deletes here.

    Args:
        run: the options of the run.
        config: the script's whole configuration, a dataclass.
        script: name of the script.
        may_change: fields, as "optimizer.learning_rate", that a resumed run may give differently.

    Returns:
        The folder that this process writes into: that of the run, or its own beneath it.

    Raises:
        InputError: see `check_output`; or the run to resume was made with another configuration.
    """
    check_output(run, script)
    described = {"script": script} | to_json(dataclasses.asdict(config))
    if run.resume:
        _check_same_config(run.out, described, {*may_change, *_RESUME_MAY_CHANGE})
    wait_for_all("every process has looked at the folder of the run")
    if is_first():
        if run.overwrite and run.out.exists():
            _delete_run(run.out)
        run.out.mkdir(parents=True, exist_ok=True)
        write_json(run.out / CONFIG_FILE, described)
    wait_for_all("the folder of the run is open")
    out = own_folder(run.out)
    out.mkdir(parents=True, exist_ok=True)
    if run.resume and not is_first():
        _copy_from_first(run.out, out)
    wait_for_all("every process has its folder")
    return out


def _copy_from_first(run: Path, own: Path) -> None:
    """What a resumed run goes on writing, as the first process has it; there may have been fewer processes."""
    for folder in (".", *RUN_FOLDERS):
        for name in (METRICS_FILE, TRAJECTORY_FILE, "costs.json"):
            if (run / folder / name).is_file():
                (own / folder).mkdir(exist_ok=True)
                shutil.copyfile(run / folder / name, own / folder / name)


def provenance(seed: int) -> dict[str, Any]:
    """Where a number comes from: commit, command, seed, device and versions, as flat JSON."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    versions = [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    return {
        "commit": _commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "seed": seed,
        "device": _device(),
        "versions": ", ".join(versions),
    }


def write_results(
    folder: Path, rows: Sequence[Mapping[str, Any]], title: str, source: Mapping[str, Any] | None = None
) -> None:
    """Write results.json (title and rows) and results.md (a table of the same rows).

    Args:
        folder: the run's folder.
        rows: flat objects; a column is shown where any row has it.
        title: heading of the table.
        source: what `provenance` returned; joins every row of results.json, and stands below the table.
    """
    source = source or {}
    write_json(folder / "results.json", {"title": title, "rows": [{**row, **source} for row in rows]})
    lines = [f"# {title}", "", markdown_table(rows), *(f"- {name}: {_cell(value)}" for name, value in source.items())]
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with one column for every key; numbers with four significant digits."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(name), 3, *(len(row[i]) for row in cells)) for i, name in enumerate(columns)]

    def line(entries: Sequence[str]) -> str:
        return "| " + " | ".join(entry.ljust(width) for entry, width in zip(entries, widths, strict=True)) + " |"

    return "\n".join([line(columns), line(["-" * width for width in widths]), *(line(row) for row in cells)]) + "\n"


def _cell(value: Any) -> str:
    value = to_json(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list):
        return ", ".join(_cell(entry) for entry in value)
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _check_writable(out: Path) -> None:
    parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise InputError(f"--out {out} cannot be written ({error.strerror}); choose another folder") from None


def _entries(out: Path) -> Iterator[Path]:
    if out.is_dir():
        yield from sorted(out.iterdir())


def _foreign_files(out: Path) -> Iterator[Path]:
    """Files in the folder of a run that no run writes; a link is foreign, since what it points to is."""
    for folder, names, files in os.walk(out):
        place = Path(folder).relative_to(out)
        for name in sorted(names):
            if (Path(folder) / name).is_symlink():
                yield Path(folder) / name
        names[:] = [name for name in sorted(names) if str(place / name) not in RUN_TREES]
        if str(place) in RUN_FOLDERS:
            yield from _foreign_files(Path(folder))
            names.clear()
            continue
        for name in sorted(files):
            path = Path(folder) / name
            if path.is_symlink() or not _is_run_file((place / name).parts):
                yield path


def _is_run_file(parts: tuple[str, ...]) -> bool:
    patterns = (Path(pattern).parts for pattern in RUN_FILES)
    return any(len(p) == len(parts) and all(map(fnmatch.fnmatchcase, parts, p)) for p in patterns)


def _delete_run(out: Path) -> None:
    # The file that marks the folder as a run goes last: killed half-way, --overwrite still works.
    for entry in sorted(out.iterdir(), key=lambda path: path.name == CONFIG_FILE):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _read_config(out: Path) -> dict[str, Any]:
    """config.json of a run; empty where it cannot be read, so that --overwrite is still possible."""
    try:
        saved = json.loads((out / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return saved if isinstance(saved, dict) else {}


def _check_same_config(out: Path, described: dict[str, Any], may_change: Collection[str]) -> None:
    saved = _read_config(out)
    if not saved:
        raise InputError(f"{out / CONFIG_FILE} is not JSON; start again with --overwrite")
    old, new = _flat(saved), _flat(described)
    for name in (*new, *(name for name in old if name not in new)):
        if name not in may_change and old.get(name) != new.get(name):
            raise InputError(
                f"--resume: {name} is {json.dumps(new.get(name))} but the run in {out} was made with "
                f"{json.dumps(old.get(name))}; give the options it was started with, or start a new run"
            )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, entry in value.items():
        flat |= _flat(entry, f"{prefix}.{name}" if prefix else name)
    return flat


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _commit() -> str | None:
    """The commit of this code, marked when files differ from it; None outside its repository."""
    # An installed copy may lie inside another repository, which does not know this file.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git("rev-parse", "HEAD")
    return f"{commit} (modified)" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _device() -> str:
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    names = [platform.processor() or platform.machine()]
    with open("/proc/cpuinfo", encoding="utf-8") if os.path.exists("/proc/cpuinfo") else open(os.devnull) as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")] or names
    return f"{names[0]}, {os.cpu_count()} cores"
