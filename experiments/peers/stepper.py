"""Training loops of others, one step per request.

Their trainers run a loop of their own to its end. Here it runs in a thread and
waits before every step until one is asked for.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

PROMPTS, SAMPLES = 4, 4


class Stepper:
    """A training loop in a thread, held between two steps.

    The loop calls `wait` before every step, the first one too; the caller calls `start`, then `step`.
    `seconds` holds what `record` measured in the last step, by phase; `new_tokens` counts its response tokens.
    """

    def __init__(self) -> None:
        self._asked: queue.Queue[None] = queue.Queue()
        self._held: queue.Queue[BaseException | None] = queue.Queue()
        self.seconds: dict[str, float] = {}
        self.new_tokens = 0

    def start(self, loop: Callable[[], Any]) -> None:
        """Run `loop` until it waits for the first time; what it raises is raised here, now or in `step`."""

        def run() -> None:
            try:
                loop()
                self._held.put(RuntimeError("the training loop has ended"))
            except BaseException as error:
                self._held.put(error)

        threading.Thread(target=run, daemon=True).start()
        self._until_held()

    def wait(self) -> None:
        """Hold the loop until the next step is asked for."""
        self._held.put(None)
        self._asked.get()

    def step(self) -> float:
        """Seconds of one step."""
        self.seconds.clear()
        self.new_tokens = 0
        start = time.perf_counter()
        self._asked.put(None)
        self._until_held()
        return time.perf_counter() - start

    def _until_held(self) -> None:
        error = self._held.get()
        if error is not None:
            raise error

    def count(self, responses: Sequence[Sequence[int]]) -> None:
        """Add the lengths of responses to `new_tokens`."""
        self.new_tokens += sum(map(len, responses))

    def record(self, target: Any, method: str, phase: str, ready: Callable[[Any], Any] = lambda result: result) -> None:
        """Add the seconds of every call of `target.method` to a phase; `ready` takes its result and waits for it."""
        original = getattr(target, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            ready(result)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
            return result

        setattr(target, method, timed)

    def answer(self) -> dict[str, Any]:
        """Take a step; its seconds, split where the phases `rollout`, `reward` and `prepare` were recorded.

        `prepare` contains the other two; what remains of it are log-probs outside the update.
        """
        total = self.step()
        rollout, reward, prepare = (self.seconds.get(name, 0.0) for name in ("rollout", "reward", "prepare"))
        return {
            "seconds": total,
            "new_tokens": self.new_tokens,
            "rollout_s": rollout,
            "reward_s": reward,
            "logprob_s": prepare - rollout - reward,
            "update_s": total - prepare,
        }


def any_reward(completions: Sequence[str]) -> list[float]:
    """Rewards that differ within a group and teach nothing."""
    return [float(len(text) % 10) for text in completions]


def random_prompts(width: int, vocab_size: int, seed: int = 0) -> list[str]:
    """Prompts of random ids, as text."""
    import random

    draw = random.Random(seed)
    return [" ".join(str(draw.randrange(vocab_size)) for _ in range(width)) for _ in range(PROMPTS)]
