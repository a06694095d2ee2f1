"""What every script shares: command line and presets, JAX settings, progress bars.

A script declares a frozen dataclass `Config` with a field `run: Run` and a dict
`PRESETS`, and ends with `run_main(main, Config, PRESETS)`. Output folders and
tables of results are in `experiments.outputs`.
"""

import argparse
import contextlib
import dataclasses
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specrl_jax.errors import InputError
from specrl_jax.parallel.hosts import is_first, join
from specrl_jax.parallel.mesh import request_cpu_devices, unused_accelerator
from specrl_jax.training.termination import Stopped

ConfigT = TypeVar("ConfigT")

# What the runtime says when it cannot reach another process.
_LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat", "Connection", "connection")
# Seconds between two plain lines of progress where there is no terminal.
_PLAIN_INTERVAL_S = 10.0


@dataclass(frozen=True)
class RunOptions:
    """Options that every script takes."""

    preset: str = "smoke"
    """Named defaults; every other option overrides them."""
    out: Path = Path("runs")
    """Folder of this run's files."""
    seed: int = 0
    """Seed of everything random."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint."""
    overwrite: bool = False
    """Delete the run in --out and start again."""
    coordinator: str | None = None
    """Of a run over several processes: ADDRESS:PORT of the first, or "auto" where Slurm or Open MPI says it."""
    processes: int | None = None
    """Their number, with an address."""
    process: int | None = None
    """Which of them this is, from 0, with an address."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise InputError(f"--seed is {self.seed}; choose a whole number from 0 to {2**31 - 1}")
        if self.resume and self.overwrite:
            raise InputError("--resume and --overwrite contradict each other; give one of them")


# As a field of a script's Config its options carry no prefix: --seed, not --run.seed.
Run = Annotated[RunOptions, tyro.conf.arg(name="")]


def check_least(prefix: str, options: Any, **least: int) -> None:
    """Raise InputError unless the named fields of `options` are at least so large; None passes.

    `prefix` is that of the options on the command line, as in --warmup.steps, or empty.
    """
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            flag = ".".join(filter(None, (prefix, name.replace("_", "-"))))
            raise InputError(f"--{flag} is {value}; it must be at least {low}")


def apply_preset(config: ConfigT, preset: Mapping[str, Any]) -> ConfigT:
    """`config` with the fields that a preset names; a nested mapping changes fields of a nested dataclass."""
    changes = {
        name: apply_preset(getattr(config, name), value) if isinstance(value, Mapping) else value
        for name, value in preset.items()
    }
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def preset_config(
    config: type[ConfigT], presets: Mapping[str, Mapping[str, Any]], name: str, *, script: str
) -> ConfigT:
    """The options of a preset, for a command line to override or for `main` as they are.

    Args: see `parse_config`; `name` is that of the preset.

    Raises:
        InputError: the preset is unknown.
    """
    if name not in presets:
        raise InputError(f'--preset "{name}" is unknown; choose one of {", ".join(presets)}')
    run = {"preset": name, "out": Path("runs") / f"{script.rpartition('.')[2]}-{name}"}
    return apply_preset(apply_preset(config(), {"run": run}), presets[name])


def parse_config(
    config: type[ConfigT],
    presets: Mapping[str, Mapping[str, Any]],
    argv: Sequence[str],
    *,
    script: str,
    description: str = "",
) -> ConfigT:
    """Read a command line.

    Args:
        config: frozen dataclass with a default for every field and a field `run: Run`.
        presets: changes to those defaults by preset name; the first is taken when none is asked for.
        argv: the arguments, without the program's name.
        script: name of the script below experiments; the default of --out is runs/SCRIPT-PRESET.
        description: text of --help.

    Raises:
        InputError: the preset is unknown, or a value is out of range.
        SystemExit: 0 after --help, 2 when an option is unknown or no value of its type.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", nargs="?", default=next(iter(presets)))
    name = early.parse_known_args(argv)[0].preset
    return tyro.cli(
        config,
        default=preset_config(config, presets, next(iter(presets)) if name is None else name, script=script),
        args=list(argv),
        prog=f"python -m experiments.{script}",
        description=f"{description}\n\nPresets: {', '.join(presets)}.",
    )


def run_main(
    main: Callable[[ConfigT], None],
    config: type[ConfigT],
    presets: Mapping[str, Mapping[str, Any]],
    *,
    script: str | None = None,
    description: str | None = None,
) -> None:
    """Parse the command line and call `main`; bad input ends in one sentence and exit status 2.

    Args: see `parse_config`; by default name and docstring of the module that `main` is defined in.
    """
    own = Path(inspect.getfile(main)).stem
    description = description or inspect.getdoc(inspect.getmodule(main)) or ""
    try:
        parsed = parse_config(config, presets, sys.argv[1:], script=script or own, description=description)
        options: RunOptions = parsed.run  # type: ignore[attr-defined]
        meshes = (getattr(parsed, name, default) for name, default in (("mesh", "auto"), ("rollout_mesh", None)))
        request_cpu_devices(*filter(None, meshes), processes=options.processes or 1)
        if options.coordinator is not None and own != "train_grpo":
            raise InputError(f"--coordinator is for train_grpo; {own} runs in one process, so leave it out")
        join(options.coordinator, options.processes, options.process)
        configure_jax()
        with _first_speaks():
            main(parsed)
    except Stopped:
        print("stopped by SIGTERM; go on with --resume", file=sys.stderr)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or not any(sign in str(error) for sign in _LOST):
            raise
        reason = " ".join(str(error).split())[:200]
        print(
            f"error: another process of this run is gone ({reason}); look at what it said last, start all of them "
            "again, and go on from the last checkpoint with --resume",
            file=sys.stderr,
            flush=True,
        )
        os._exit(3)  # an orderly end would wait for the others


@contextlib.contextmanager
def _first_speaks() -> Iterator[None]:
    """Of several processes only the first one prints."""
    with contextlib.ExitStack() as stack:
        if not is_first():
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield


def configure_jax(cache: Path | None = None) -> None:
    """Keep compiled programs on disk for the next run, and warn when an accelerator lies idle.

    Args:
        cache: folder of compiled programs; by default that of JAX_COMPILATION_CACHE_DIR,
            else specrl_jax in the user's cache folder.
    """
    if cache is None and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specrl_jax"
    if cache is not None:
        # A home that cannot be written costs compile time, nothing else.
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            jax.config.update("jax_compilation_cache_dir", str(cache))
    warning = unused_accelerator()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)


@contextlib.contextmanager
def profile(folder: Path | None) -> Iterator[None]:
    """Record a trace of everything inside, to be read by XProf or Perfetto; nothing when `folder` is None."""
    if folder is None:
        yield
        return
    with jax.profiler.trace(str(folder)):
        yield


class Advance(Protocol):
    """Reports progress: `advance(steps, "reward 0.43")`."""

    def __call__(self, steps: int = 1, note: str = "") -> None:
        """Count `steps` more."""


@contextlib.contextmanager
def progress(description: str, total: int, done: int = 0) -> Iterator[Advance]:
    """A progress bar with the time left; a plain line now and then where stdout is no terminal.

    Args:
        description: what is counted.
        total: steps in all.
        done: steps that a resumed run has behind it.

    Yields:
        A function that counts steps and may say something about them.
    """
    console = Console()
    if not console.is_terminal:
        yield _plain_progress(description, total, done)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=total, completed=done, note="")

        def advance(steps: int = 1, note: str = "") -> None:
            bar.update(task, advance=steps, note=note)

        yield advance


def _plain_progress(description: str, total: int, done: int) -> Advance:
    start = last = time.monotonic()
    first = done

    def advance(steps: int = 1, note: str = "") -> None:
        nonlocal done, last
        done += steps
        now = time.monotonic()
        if done < total and now - last < _PLAIN_INTERVAL_S:
            return
        last = now
        left = (now - start) / (done - first) * (total - done)
        print(f"{description} {done}/{total} {note} ({_minutes(left)} left)".replace("  ", " "), flush=True)

    return advance


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
