"""The least that rounds could cost: their matrix products alone, and what drafts could then save."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.expand import Pair
from experiments.turns import after_itself, seconds_of
from specrl_jax.models.attention import paged_attention
from specrl_jax.models.cache import KVCache
from specrl_jax.models.linear import linear, linears
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.policy import head_weights, policy_cache

ROUNDS = 4
"""Rounds, steps or trips of a timed call."""


def timed(fn: Callable[[Any, Any], Any], weights: Any, x: Any, trips: int = ROUNDS) -> Callable[[], float]:
    """`fn(weights, x)`, which keeps the shape of `x`, `trips` times in one program; tells its seconds per trip."""
    compiled = jax.jit(lambda weights, x: jax.lax.fori_loop(0, trips, lambda _, y: fn(weights, y), x))
    call = seconds_of(lambda: compiled(weights, x))
    return after_itself(lambda: call() / trips)


def bare_policy(params: Any, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """The policy's weight matrices applied one after the other, and nothing else; every product is used."""
    for layer in params.layers:
        q, k, v = linears(x, (layer.q_proj, layer.k_proj, layer.v_proj))
        mixed = q + jnp.tile(k + v, (1, q.shape[1] // k.shape[1]))
        x = x + 1e-3 * linear(mixed, layer.o_proj)
        gated, raised = linears(x, (layer.gate_proj, layer.up_proj))
        x = x + 1e-3 * linear(gated * raised, layer.down_proj)
    _, head = head_weights(params)
    return x + 1e-6 * linear(x, head)[:, : x.shape[1]]


def bare_attention(cache: KVCache, x: Float[Array, "r q h c"]) -> Float[Array, "r q h c"]:
    """Attention of `q` queries per row over all slots of every layer's cache, as a forward has it, and no more."""
    last = jnp.full(x.shape[:2], cache.capacity - 1, jnp.int32)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        x = x + 1e-6 * paged_attention(x, keys, values, cache.table, last, Numerics())
    return x


def bare_draft_step(draft: Any, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """The same of one step of the draft head."""
    weights = draft.weights
    wide = jnp.concatenate([x, x], axis=1)
    q, k, v = linears(wide, (weights.q_proj, weights.k_proj, weights.v_proj))
    x = x + 1e-3 * linear(q + jnp.tile(k + v, (1, q.shape[1] // k.shape[1])), weights.o_proj)
    gated, raised = linears(x, (weights.gate_proj, weights.up_proj))
    x = x + 1e-3 * linear(gated * raised, weights.down_proj)
    return x + 1e-6 * linear(x, weights.lm_head)[:, : x.shape[1]]


def bare_calls(pair: Pair, tokens: int, trips: int = ROUNDS) -> tuple[Callable[[], float], Callable[[], float]]:
    """The policy's products for so many tokens, and the draft head's, timed."""
    x = jnp.ones((tokens, pair.policy.hidden_size), jnp.dtype(pair.policy.dtype))
    return timed(bare_policy, pair.params, x, trips), timed(bare_draft_step, pair.draft, x, trips)


def attention_calls(pair: Pair, rows: int, context: int, queries: Iterable[int]) -> dict[int, Callable[[], float]]:
    """Attention of so many queries of every row to so many tokens, in all layers, timed, by the number of queries."""
    cache, heads = policy_cache(pair.policy, rows, context, Numerics()), (pair.policy.num_heads, pair.policy.head_dim)
    return {q: timed(bare_attention, cache, jnp.ones((rows, q, *heads), jnp.dtype(pair.policy.dtype))) for q in queries}


@dataclass(frozen=True)
class Floors:
    """Measured seconds of bare products: of the policy and of a draft step, for so many tokens each; between, lines.

    attention: of one row with 1, 2, ... queries; nothing where it is left out.
    """

    tokens: Int[np.ndarray, "n"]
    policy: Float[np.ndarray, "n"]
    draft: Float[np.ndarray, "n"]
    attention: Float[np.ndarray, "q"] = field(default_factory=lambda: np.zeros(0))

    @property
    def without_attention(self) -> "Floors":
        """Those of products with weights alone."""
        return replace(self, attention=np.zeros(0))

    def _attention(self, rows: int, queries: int) -> float:
        return rows * float(self.attention[queries - 1]) if len(self.attention) else 0.0

    def step(self, rows: int) -> float:
        """Of an autoregressive step."""
        return float(np.interp(rows, self.tokens, self.policy)) + self._attention(rows, 1)

    def cost(self, rows: int, k: int) -> float:
        """Of a round of `k` drafts per row, in autoregressive steps."""
        verify = float(np.interp(rows * (k + 1), self.tokens, self.policy)) + self._attention(rows, k + 1)
        return (verify + k * float(np.interp(rows, self.tokens, self.draft))) / self.step(rows)

    def speedup(self, rows: int, survival: Sequence[float]) -> float:
        """The most that drafts can save for so many rows: the best draft length, none included.

        `survival[i]` is the probability that the first `i + 1` drafts of a row are accepted.
        """
        emitted = 1.0 + np.cumsum([0.0, *survival])
        return max(float(emitted[k]) / self.cost(rows, k) for k in range(len(emitted)))


_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_PROMPT = 512  # tokens that are read together
_LONG = 64  # tokens from which one trip is long enough to be timed


def floor_calls(pair: Pair, rows: int, longest: int, context: int = 0) -> dict[str, Callable[[], float]]:
    """Products of 1 to `rows * (longest + 1)` tokens, and of a long prompt's, to be timed beside what they bound.

    With a context also attention to so many tokens, of a row with 1 to `longest + 1` queries.
    """
    most = rows * (longest + 1)
    calls: dict[str, Callable[[], float]] = {}
    for n in sorted({*(n for n in _STEPS if n < most), most, _PROMPT}):
        calls[f"floor policy {n}"], calls[f"floor draft {n}"] = bare_calls(pair, n, ROUNDS if n < _LONG else 1)
    if context:
        for queries, call in attention_calls(pair, rows, context, range(1, longest + 2)).items():
            calls[f"floor attention {queries}"] = partial(_of_a_row, call, rows)
    return calls


def _of_a_row(call: Callable[[], float], rows: int) -> float:
    return call() / rows


def floors_by_turn(seconds: Mapping[str, Float[np.ndarray, "t"]]) -> list[Floors]:
    """The floors of every turn, from what `floor_calls` took in it; other calls are passed over."""
    parts: dict[str, list[Any]] = {
        part: [taken for name, taken in seconds.items() if name.startswith(f"floor {part} ")]
        for part in ("policy", "draft", "attention")
    }
    if not parts["policy"]:
        return []
    counts = np.array([int(name.rsplit(" ", 1)[1]) for name in seconds if name.startswith("floor policy ")])
    turns = range(len(parts["policy"][0]))
    return [Floors(counts, *(np.array([taken[t] for taken in own]) for own in parts.values())) for t in turns]


def live_rows(limits: Int[np.ndarray, "b"], rows: int) -> Int[np.ndarray, "t"]:
    """Live rows at every autoregressive step of sequences of such lengths that wait in order for `rows` rows."""
    waiting, left, live = list(limits), np.zeros((0,), int), []
    while waiting or len(left):
        while waiting and len(left) < rows:
            left = np.append(left, waiting.pop(0))
        live.append(len(left))
        left = left[left > 1] - 1
    return np.array(live)


def allowed_speedup(
    floors: Floors, limits: Int[np.ndarray, "b"], rows: int, survival: Sequence[float], prompt_tokens: int
) -> float:
    """What the floors allow drafts to save of a rollout, with the best draft length for every number of live rows.

    `prompt_tokens` are read first, in all of the prompts, with and without drafts.
    """
    live = live_rows(limits, rows)
    steps = np.array([floors.step(n) for n in range(1, rows + 1)])[live - 1]
    best = np.array([floors.speedup(n, survival) for n in range(1, rows + 1)])[live - 1]
    reading = float(floors.policy[-1]) * prompt_tokens / int(floors.tokens[-1])
    return float((reading + np.sum(steps)) / (reading + np.sum(steps / best)))
