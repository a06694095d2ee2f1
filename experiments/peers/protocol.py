"""The peer's side of the conversation: one JSON object per line, on stdin and stdout.

A request is {"op": NAME, ...}, the answer what that operation returns, or
{"error": one sentence}. {"op": "quit"} ends the peer. This module runs in the
environment of the peer and needs nothing but the standard library.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, TextIO

Operation = Callable[..., dict[str, Any]]


def claim_stdout() -> TextIO:
    """The standard output as it was; whatever libraries print there from now on goes to stderr."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def one_sentence(error: BaseException) -> str:
    """What went wrong, on one line of at most 500 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:500]


def serve(operations: Mapping[str, Operation]) -> None:
    """Answer requests until there are no more, then end the process.

    An operation that raises answers {"error": ...} and the peer lives on.

    An operation imports its libraries itself: they print, and some are missing.
    """
    channel = claim_stdout()
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("op")
        if name == "quit":
            break
        try:
            if name not in operations:
                raise ValueError(f"operation {name!r} is unknown; this peer has {', '.join(operations)}")
            answer = operations[name](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": one_sentence(error)}
        print(json.dumps(answer), file=channel, flush=True)
    sys.stderr.flush()
    # A trainer's threads, held between two steps, would never be joined.
    os._exit(0)


def loaded(*packages: str, **details: Any) -> dict[str, Any]:
    """The answer to a load: versions of the distributions that matter."""
    return {"ok": True, "versions": {name: version(name) for name in packages}} | details


def spread(values: int | list[int], rows: int) -> list[int]:
    """One number per row, from a list or from one number for all."""
    per_row = [values] * rows if isinstance(values, int) else list(values)
    if len(per_row) != rows:
        raise ValueError(f"max_new_tokens has {len(per_row)} entries for {rows} prompts; give one per prompt")
    return per_row


def generated(
    seconds: float,
    tokens: list[list[int]],
    log_probs: list[list[float]] | None = None,
    *,
    rounds: int | None = None,
    accepted: int | None = None,
    drafted: int | None = None,
) -> dict[str, Any]:
    """The answer to a generate; counts of speculation are None where the peer does not speculate or does not count."""
    return {
        "seconds": seconds,
        "tokens": tokens,
        "log_probs": log_probs,
        "log_probs_computed": log_probs is not None,
        "rounds": rounds,
        "accepted": accepted,
        "drafted": drafted,
        "acceptance_length": 1 + accepted / rounds if rounds and accepted is not None else None,
    }


def seconds_of(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Seconds of every repetition of `call` and their median, after two that do not count."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    kept = sorted(seconds[2:])
    return {"seconds": kept[len(kept) // 2], "seconds_all": seconds[2:]}
