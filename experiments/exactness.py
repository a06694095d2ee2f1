"""Rollouts of the same sequences by different programs, compared token by token.

Two programs for one computation differ by rounding. A draw is the largest of the
perturbed logits, so it differs only where the two largest are nearer to each other
than the rounding: a tie. How many ties there should be follows from the size of the
rounding and from the law itself, and is compared with how many there are.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.protocol import Drafter
from specrl_jax.models.cache import keep_path
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import forward, grid_batch, logits, policy_cache, sequence_positions
from specrl_jax.models.tree import Tree
from specrl_jax.parallel.mesh import MeshConfig, make_mesh
from specrl_jax.parallel.sharding import ROWS, Layout, over_mesh, sum_over_rows
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import gumbel_noise, sequence_keys
from specrl_jax.rollout.rules import Match, Rule
from specrl_jax.rollout.sampling import Context, SamplingLaw
from specrl_jax.rollout.trajectory import Sequences, Trajectory, to_sequences, trajectory_specs
from specrl_jax.training.sampling import concatenate


@dataclass(frozen=True)
class Arm:
    """One way to draw the same sequences.

    drafter: name of one of the drafters at hand. batch: rows together. permuted: the sequences in another order.
    spare: further slots of the cache. mesh: devices.
    """

    numerics: Numerics
    draft_length: int = 0
    rule: Rule = Match()
    drafter: str = "none"
    batch: int = 256
    permuted: bool = False
    spare: int = 0
    mesh: MeshConfig = MeshConfig()

    @property
    def tree(self) -> Tree:
        """The tokens of a round."""
        return self.rule.tree(self.draft_length)


@dataclass(frozen=True, eq=False)
class Scene:
    """What every arm shares.

    drafters: by name, with their parameters as a function of the sequences that a batch holds.
    """

    policy: PolicyConfig
    params: PolicyParams
    prompts: Prompts
    law: SamplingLaw
    max_new_tokens: int
    seed: int
    drafters: Mapping[str, tuple[Drafter, Any]]

    @functools.cached_property
    def keys(self) -> UInt32[Array, "b 2"]:
        """Noise keys, one sequence per prompt."""
        return sequence_keys(self.seed, "evaluation", 0, self.prompts.row_ids, jnp.zeros(self.count, jnp.int32))

    @property
    def count(self) -> int:
        """Sequences."""
        return self.prompts.lengths.shape[0]


def roll(scene: Scene, arm: Arm) -> Trajectory:
    """The responses as this arm draws them, in the order of the prompts, on the host."""
    order = np.arange(scene.count)
    if arm.permuted:
        order = np.random.default_rng(scene.seed + 1).permutation(scene.count)
    drafter, params_of = scene.drafters[arm.drafter] if arm.draft_length else (None, None)
    config = RolloutConfig(scene.max_new_tokens, 1, arm.draft_length, scene.law, arm.rule)
    engine = RolloutEngine(scene.policy, config, arm.numerics, drafter)
    program = jax.jit(engine.rollout) if arm.mesh.size == 1 else _on_mesh(engine, arm.mesh)
    parts = []
    for start in range(0, scene.count, arm.batch):
        rows = order[start : start + arm.batch]
        prompts: Prompts = jax.tree.map(lambda x, rows=rows: x[rows], scene.prompts)
        prompts = replace(prompts, tokens=jnp.pad(prompts.tokens, ((0, 0), (0, arm.spare))))
        draft = None if params_of is None else params_of(rows)
        trajectory = jax.device_get(program(scene.params, draft, prompts, scene.keys[rows]))
        narrow = prompts.tokens[:, : scene.prompts.tokens.shape[1]]
        parts.append(replace(trajectory, prompts=replace(trajectory.prompts, tokens=np.asarray(narrow))))
    joined = concatenate(parts)
    back = np.argsort(order)
    names = ("tokens", "log_probs", "thresholds", "lengths", "ended", "prompts")
    sorted_: dict[str, Any] = {name: jax.tree.map(lambda x: x[back], getattr(joined, name)) for name in names}
    return replace(joined, **sorted_)


def _on_mesh(engine: RolloutEngine, config: MeshConfig) -> Any:
    """The rollout with parameters stored over a mesh and gathered, as in a GRPO step."""
    mesh = make_mesh(config)
    head = getattr(engine.drafter, "config", None)
    layouts = Layout(mesh, engine.policy.num_kv_heads), Layout(mesh, getattr(head, "num_kv_heads", 1))

    def run(params: PolicyParams, draft: Any, prompts: Prompts, keys: UInt32[Array, "b 2"]) -> Trajectory:
        trajectory = engine.rollout(params, draft, prompts, keys)
        stats, entropy = sum_over_rows((trajectory.stats, trajectory.entropy_sum))
        return replace(trajectory, stats=stats, entropy_sum=entropy)

    on_rows = over_mesh(mesh, run, (P(), P(), P(ROWS), P(ROWS)), trajectory_specs(P(ROWS)))

    @jax.jit
    def gathered(params: PolicyParams, draft: Any, *rows: Any) -> Trajectory:
        return on_rows(layouts[0].gather(params), layouts[1].gather(draft), *rows)

    def program(params: PolicyParams, draft: Any, *rows: Any) -> Trajectory:
        return gathered(layouts[0].place(params), layouts[1].place(draft), *rows)

    return program


def first_differences(ours: Trajectory, reference: Trajectory) -> Int[np.ndarray, "b"]:
    """Position of the first token of each response that differs, -1 where none does."""
    differ = np.asarray(ours.tokens) != np.asarray(reference.tokens)
    short = np.minimum(ours.lengths, reference.lengths)
    cut = (ours.lengths != reference.lengths) & ~np.any(differ, axis=1)
    first = np.argmax(differ, axis=1)
    return np.where(np.any(differ, axis=1), first, np.where(cut, short, -1))


def compared_tokens(first: Int[np.ndarray, "b"], reference: Trajectory) -> int:
    """Tokens drawn from the same prefix in both runs: all up to the first that differs."""
    return int(np.where(first >= 0, first + 1, reference.lengths).sum())


def gaps(scene: Scene, reference: Trajectory, first: Int[np.ndarray, "b"]) -> list[dict[str, Any]]:
    """Every divergence with the distance of the two largest perturbed logits, by a teacher-forced forward."""
    sequences = to_sequences(jax.tree.map(jnp.asarray, reference))
    found = []
    for row in np.flatnonzero(first >= 0):
        position, prompt = int(first[row]), int(reference.prompts.lengths[row])
        scores = _perturbed(scene, sequences.tokens[row][None], prompt + position, scene.keys[row][None], position)
        best = np.sort(np.asarray(scores)[0])[::-1]
        found.append({"sequence": int(row), "position": position, "gap": float(best[0] - best[1])})
    return found


def _perturbed(
    scene: Scene, tokens: Int[Array, "b t"], length: int, keys: UInt32[Array, "b 2"], position: int
) -> Float[Array, "b v"]:
    lengths = jnp.full((1,), length, jnp.int32)
    batch = grid_batch(tokens, sequence_positions(lengths, tokens.shape[1]))
    out = _forward(scene.params, scene.policy, batch)
    scores = logits(scene.params, scene.policy, out.hidden[length - 1 : length], Numerics())
    ids, at = jnp.arange(scores.shape[1], dtype=jnp.int32), jnp.full((1,), position, jnp.int32)
    return scene.law.log_law(scores, Context(at), ids) + gumbel_noise(keys, at, ids)


@functools.partial(jax.jit, static_argnums=1)
def _forward(params: PolicyParams, config: PolicyConfig, batch: Any) -> Any:
    return forward(params, config, batch, numerics=Numerics())


@functools.partial(jax.jit, static_argnums=(1, 2, 4))
def decoded_logits(
    params: PolicyParams, policy: PolicyConfig, numerics: Numerics, sequences: Sequences, tree: Tree
) -> tuple[Float[Array, "b t v"], Bool[Array, "b t"]]:
    """Logits at every position of given sequences, decoded in rounds of this tree that accept all drafts.

    Every node carries the true token of its depth; the deepest path counts. Returns the logits after each
    position from 1 on, and which of them are of response tokens.
    """
    rows, width = sequences.tokens.shape
    step = tree.depth + 1
    rounds = -(-(width - 1) // step)
    path = jnp.asarray(tree.paths[int(np.argmax(tree.depths))])
    depths = jnp.asarray(tree.depths, jnp.int32)
    cache = policy_cache(policy, rows, 1 + rounds * step + tree.size, numerics)
    one = jnp.ones((rows,), jnp.int32)
    first = grid_batch(sequences.tokens[:, :1], jnp.zeros((rows, 1), jnp.int32))
    prefilled = forward(params, policy, first, numerics=numerics, cache=cache).cache
    assert prefilled is not None
    cache = replace(prefilled, length=one)
    padded = jnp.pad(sequences.tokens, ((0, 0), (0, step)))

    def body(cache: Any, _: None) -> Any:
        positions = cache.length[:, None] + depths[None]
        tokens = jnp.take_along_axis(padded, jnp.minimum(positions, padded.shape[1] - 1), axis=1)
        out = forward(params, policy, grid_batch(tokens, positions, tree), numerics=numerics, cache=cache)
        scores = logits(params, policy, out.hidden, numerics).reshape(rows, tree.size, -1)[:, path]
        whole = jnp.broadcast_to(path[None], (rows, step))
        assert out.cache is not None
        return replace(keep_path(out.cache, cache.length, whole), length=cache.length + step), scores

    _, scores = lax.scan(body, cache, None, length=rounds)
    scores = scores.transpose(1, 0, 2, 3).reshape(rows, rounds * step, -1)[:, : width - 1]
    # The logits after position p are those of token p + 1.
    drawn_next = jnp.pad(sequences.mask, ((0, 0), (0, 1)))[:, 2:]
    return scores, drawn_next


@dataclass(frozen=True)
class Rounding:
    """rms: difference of two programs' tempered logits. collision: mean of 1 - sum p^2 over tokens. entropy: nats."""

    rms: float
    collision: float
    entropy: float

    @property
    def ties_per_token(self) -> float:
        """Draws that should differ: two Gumbel-perturbed logits lie within g with probability (1 - sum p^2) g."""
        return 0.6 * self.rms * self.collision


def rounding(scene: Scene, numerics: Numerics, sequences: Sequences, tree: Tree, batch: int) -> Rounding:
    """How two programs differ on given sequences: one token at a time of all, and rounds of `tree` of `batch` rows."""
    scale = 1.0 / (scene.law.temperature or 1.0)
    one, mask = decoded_logits(scene.params, scene.policy, numerics, sequences, Tree.chain(0))
    parts = []
    for start in range(0, sequences.tokens.shape[0], batch):
        some: Sequences = jax.tree.map(lambda x, start=start: x[start : start + batch], sequences)
        parts.append(decoded_logits(scene.params, scene.policy, numerics, some, tree)[0])
    many = jnp.concatenate(parts)
    one, many = (np.asarray(x, np.float64)[np.asarray(mask)] * scale for x in (one, many))
    p = np.exp(one - one.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    entropy = -np.sum(p * np.log(np.maximum(p, 1e-300)), axis=-1)
    rms = float(np.sqrt(np.mean((one - many) ** 2)))
    return Rounding(rms, float(np.mean(1.0 - np.sum(p * p, axis=-1))), float(entropy.mean()))
