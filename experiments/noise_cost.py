"""What the noise of a draw costs, beside the decode step that it belongs to.

A draw with noise (integer hash of sequence, position and token, two logarithms, sum) is timed in turn
with the same draw without noise, and with a decode step of the policy. Weights are random; only shapes matter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from experiments.common import Run, RunOptions, check_least, run_main
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.turns import in_turn, seconds_of
from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import init_params
from specrl_jax.models.policy import forward, grid_batch, logits, policy_cache
from specrl_jax.models.presets import PRESETS as SHAPES
from specrl_jax.rollout.noise import best, sequence_keys
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.metrics import write_json

SCRIPT = "noise_cost"


@dataclass(frozen=True)
class Config:
    """Options of the measurement."""

    run: Run = RunOptions()
    shape: str = "qwen3-0.6b"
    """Name of an architecture, as in qwen3-0.6b."""
    dtype: Dtype = "float32"
    rows: tuple[int, ...] = (1, 8)
    context: int = 128
    """Tokens in the cache."""
    repeats: int = 7

    def __post_init__(self) -> None:
        check_least("", self, context=1, repeats=1)
        if self.shape not in SHAPES:
            raise InputError(f"--shape is {self.shape}; choose one of {', '.join(SHAPES)}")
        if min(self.rows, default=0) < 1:
            raise InputError("--rows must name at least one number, all of them at least 1")

    @property
    def mesh(self) -> str:
        """One device."""
        return "data=1"


PRESETS: dict[str, Mapping[str, Any]] = {"default": {}, "smoke": {"shape": "tiny-qwen3", "repeats": 3}}


def drawn(scores: Float[Array, "r v"], keys: UInt32[Array, "r 2"], positions: Int[Array, "r"]) -> Int[Array, "r"]:
    """Draws with noise."""
    ids = jnp.arange(scores.shape[1], dtype=jnp.int32)
    return best(SamplingLaw().perturbed(scores, keys, positions, ids))[:, 0]


def calls_for(config: Config, rows: int) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    policy = replace(SHAPES[config.shape], dtype=config.dtype)
    params = jax.jit(init_params, static_argnums=1)(jax.random.key(config.run.seed), policy)
    length = jnp.full((rows,), config.context, jnp.int32)
    cache = replace(policy_cache(policy, rows, config.context + 1, Numerics()), length=length)
    tokens, keys = (
        jnp.ones((rows, 1), jnp.int32),
        sequence_keys(
            config.run.seed,
            "rollout",
            0,
            jnp.arange(rows, dtype=jnp.uint32),
            jnp.zeros((rows,), jnp.int32),
        ),
    )

    @jax.jit
    def step(params: Any, cache: Any) -> Any:
        out = forward(params, policy, grid_batch(tokens, length[:, None]), numerics=Numerics(), cache=cache)
        return logits(params, policy, out.hidden, Numerics())

    scores = step(params, cache)
    with_noise, plain = jax.jit(drawn), jax.jit(lambda scores: best(scores)[:, 0])
    return {
        "step": lambda: step(params, cache),
        "draw": lambda: with_noise(scores, keys, length),
        "without": lambda: plain(scores),
    }


def measure(config: Config, rows: int) -> dict[str, Any]:
    """Medians over repeats in turn, and the noise as a share of the step of the same turn."""
    calls = calls_for(config, rows)
    seconds = in_turn({name: seconds_of(call) for name, call in calls.items()}, config.repeats, discard=2)
    step, draw, without = (seconds[name] for name in ("step", "draw", "without"))
    shares = (draw - without) / (step + draw)
    return {
        "shape": config.shape,
        "dtype": config.dtype,
        "rows": rows,
        "vocab_size": SHAPES[config.shape].vocab_size,
        "step_ms": 1e3 * float(np.median(step)),
        "draw_ms": 1e3 * float(np.median(draw)),
        "draw_without_noise_ms": 1e3 * float(np.median(without)),
        "noise_share": float(np.median(shares)),
        "noise_share_low": float(shares.min()),
        "noise_share_high": float(shares.max()),
    }


def main(config: Config) -> None:
    """Measure, write and print."""
    check_output(config.run, SCRIPT)
    out = open_output(config.run, config, SCRIPT)
    rows = [measure(config, count) for count in config.rows]
    source = provenance(config.run.seed)
    write_results(out, rows, "Cost of the noise", source)
    write_json(out / "summary.json", {"noise_share": max(row["noise_share"] for row in rows)} | source)
    print(markdown_table(rows), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
