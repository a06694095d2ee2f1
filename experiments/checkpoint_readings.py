"""How a draft head may be read, and what it accepts when read so: the measurements of `check_checkpoint`.

A head is measured on rows of its policy without a rollout: a step of the training-time test stands for each draft, and
the overlap of the two laws, `sum min(p, q)`, is the probability that a ratio test accepts it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.drafters.draft_layer import LayerConfig, LayerParams
from specrl_jax.drafters.draft_losses import (
    DraftBatch,
    DraftLossConfig,
    Shared,
    drafted_slots,
    judge_all,
    shift,
    teacher,
)
from specrl_jax.drafters.eagle3_params import Eagle3Config, Eagle3Params
from specrl_jax.drafters.eagle3_training import judged_steps
from specrl_jax.drafters.heads import shared_with_head
from specrl_jax.drafters.mtp_layouts import MtpConfig
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Sequences


@dataclass(frozen=True, eq=False)
class Reading:
    """A head as its folder says, or as it may have been meant.

    name: for the table.
    fault, because, remedy: if this reading is right, the kind of fault, what is wrong with the folder, what to change.
    config, params: of the head, read so.
    """

    name: str
    fault: str
    because: str
    remedy: str
    config: LayerConfig
    params: LayerParams


def _shifted(config: LayerConfig, by: int) -> LayerConfig:
    if isinstance(config, MtpConfig):
        return replace(config, boundary=config.boundary + by)
    return replace(config, boundaries=tuple(boundary + by for boundary in config.boundaries))


def _boundary_readings(config: LayerConfig, params: LayerParams, num_layers: int) -> list[Reading]:
    found = []
    for by, name in ((-1, "read one layer lower"), (1, "read one layer higher")):
        meant = [boundary + by for boundary in config.boundaries]
        if meant[0] < 0 or meant[-1] > num_layers:
            continue
        because = f"its features are one layer off, it reads boundaries {list(config.boundaries)}"
        remedy = f"set residual_boundaries under eagle_config to {meant} in its config.json"
        if isinstance(config, MtpConfig):
            remedy = f"it was trained behind layer {meant[0]}; train it again, or give the policy that it was made for"
        found.append(Reading(name, "boundaries", because, remedy, _shifted(config, by), params))
    return found


def _swapped(params: Eagle3Params) -> Eagle3Params:
    def swap(kernel: Float[Array, "o i"]) -> Float[Array, "o i"]:
        return jnp.roll(kernel, kernel.shape[1] // 2, axis=1)

    old = params.weights
    new = replace(old, q_proj=swap(old.q_proj), k_proj=swap(old.k_proj), v_proj=swap(old.v_proj))
    return replace(params, weights=new)


def _eagle3_readings(config: Eagle3Config, params: Eagle3Params) -> list[Reading]:
    now, meant = ("after", "before") if config.norm_output else ("before", "after")
    feedback = f"its own hidden state is fed back {now} the final norm and was meant {meant} it"
    flag = f"set norm_output to {str(not config.norm_output).lower()} in its config.json"
    halves = "embedding and hidden state are swapped in its attention input"
    columns = "swap the two halves of the columns of q_proj, k_proj and v_proj in its model.safetensors"
    other = replace(config, norm_output=not config.norm_output)
    return [
        Reading(f"fed back {meant} the norm", "feedback", feedback, flag, other, params),
        Reading("halves swapped", "halves", halves, columns, config, _swapped(params)),
    ]


def _mtp_readings(config: MtpConfig, params: LayerParams) -> list[Reading]:
    layout = config.layout
    now, meant = ("after", "before") if layout.normed_features else ("before", "after")
    feature = f"it reads the policy's hidden state {now} the final norm and was meant to {meant} it"
    halves = "embedding and hidden state are swapped in its projection"
    remedy = "give the architecture in its config.json whose layout it has"
    normed = replace(config, layout=replace(layout, normed_features=not layout.normed_features))
    order = replace(config, layout=replace(layout, embedding_first=not layout.embedding_first))
    return [
        Reading(f"features {meant} the norm", "feedback", feature, remedy, normed, params),
        Reading("halves swapped", "halves", halves, remedy, order, params),
    ]


def readings(config: LayerConfig, params: LayerParams, num_layers: int) -> list[Reading]:
    """The head as it was loaded, and the ways in which heads were mistaken before."""
    loaded = Reading("as loaded", "", "", "", config, params)
    if isinstance(config, MtpConfig):
        others = _mtp_readings(config, params)
    else:
        assert isinstance(params, Eagle3Params)
        others = _eagle3_readings(config, params)
    return [loaded, *_boundary_readings(config, params, num_layers), *others]


def as_sequences(rows: list[tuple[int, ...]] | Int[np.ndarray, "r t"], answer_at: tuple[int, ...] = ()) -> Sequences:
    """Rows of tokens, padded to the longest; those from `answer_at` on are the response, or all after the first."""
    width = max(map(len, rows))
    tokens = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        mask[i, (answer_at[i] if answer_at else 1) : len(row)] = True
    lengths = jnp.asarray([len(row) for row in rows], jnp.int32)
    return Sequences(jnp.asarray(tokens), lengths, jnp.asarray(mask), jnp.zeros(tokens.shape, jnp.float32))


def _scorer(policy: PolicyConfig) -> Scorer:
    return Scorer(policy, SamplingLaw(), Numerics("plain"))


def _by_rows(run: Callable[[Sequences], Array], sequences: Sequences, rows: int, axis: int = 0) -> np.ndarray:
    """`run` over parts of `rows` rows, the last filled up; joined along `axis` on the host."""
    total = sequences.tokens.shape[0]
    found = []
    for start in range(0, total, rows):
        picked = np.minimum(start + np.arange(min(rows, total)), total - 1)
        part = np.asarray(run(jax.tree.map(lambda x, at=picked: x[at], sequences)))
        found.append(part.take(range(min(rows, total - start)), axis=axis))
    return np.concatenate(found, axis=axis)


@partial(jax.jit, static_argnums=0)
def _log_probs(policy: PolicyConfig, params: PolicyParams, sequences: Sequences) -> Float[Array, "b t"]:
    return _scorer(policy).score(params, sequences).log_probs


def mean_log_probs(
    policy: PolicyConfig, params: PolicyParams, sequences: Sequences, rows: int
) -> Float[np.ndarray, "b"]:
    """Mean log-probability in nats of a response's token, by row."""
    found = _by_rows(partial(_log_probs, policy, params), sequences, rows)
    mask = np.asarray(sequences.mask)
    return np.where(mask, found, 0.0).sum(1) / np.maximum(mask.sum(1), 1)


def unrolled_overlap(
    config: LayerConfig, params: LayerParams, shared: Shared, batch: DraftBatch, steps: int
) -> Float[Array, "i b t"]:
    """Overlap of every step's law with the policy's at every slot, `[i, :, p]` of the token at `p + 2 + i`."""
    weights, shared = params.with_rows(params.weights), replace(shared, embed=params.embedding(shared.embed))
    _, judged = judged_steps(weights, params.target_ids, shared, batch, config, DraftLossConfig(steps=steps))
    return jnp.stack([step.accepted for step in judged])


def _batch_of(
    policy: PolicyConfig, boundaries: tuple[int, ...], params: PolicyParams, sequences: Sequences
) -> DraftBatch:
    scores = _scorer(policy).score(params, sequences, boundaries)
    assert scores.features is not None
    assert scores.states is not None
    return DraftBatch(sequences.tokens, scores.features, scores.states, sequences.mask)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _overlap(
    policy: PolicyConfig,
    config: LayerConfig,
    steps: int,
    params: PolicyParams,
    draft: LayerParams,
    sequences: Sequences,
) -> Float[Array, "i b t"]:
    batch = _batch_of(policy, config.boundaries, params, sequences)
    return unrolled_overlap(config, draft, shared_with_head(params), batch, steps)


def overlap(
    policy: PolicyConfig, params: PolicyParams, reading: Reading, sequences: Sequences, steps: int, rows: int
) -> Float[np.ndarray, "i b"]:
    """Overlap of every step, by row: its mean over the slots where a round could have drafted it; 0 where none is."""
    run = partial(_overlap, policy, reading.config, steps, params, reading.params)
    found = _by_rows(run, sequences, rows, axis=1)
    drafted = np.stack([np.asarray(drafted_slots(sequences.mask, step)) for step in range(steps)])
    return np.where(drafted, found, 0.0).sum(2) / np.maximum(drafted.sum(2), 1)


@partial(jax.jit, static_argnums=0)
def _frequency_overlap(
    policy: PolicyConfig,
    params: PolicyParams,
    ids: Int[Array, "dv"],
    log_share: Float[Array, "dv"],
    sequences: Sequences,
) -> Float[Array, "b t"]:
    batch = _batch_of(policy, (0,), params, sequences)
    rows, loss = shared_with_head(params).head, DraftLossConfig(steps=1)
    states, following = jax.tree.map(partial(shift, steps=1), (batch.states, teacher(batch, rows, loss.chunk)))

    def drafts_of(shares: Array, slots: Array) -> Array:
        return jnp.broadcast_to(shares[None], (slots.shape[0], shares.shape[0]))

    slots = jnp.zeros((sequences.tokens.size,), jnp.float32)
    return judge_all(loss, drafts_of, log_share, (slots,), states, following, rows, ids).accepted


def frequency_overlap(
    policy: PolicyConfig, params: PolicyParams, ids: Int[Array, "dv"], sequences: Sequences, rows: int
) -> Float[np.ndarray, "b"]:
    """What drafts would be accepted that follow the responses' frequencies of tokens and look at nothing, by row."""
    counts = np.bincount(np.asarray(sequences.tokens)[np.asarray(sequences.mask)], minlength=policy.vocab_size)
    log_share = jnp.log(jnp.asarray(counts, jnp.float32)[ids] + 1e-6)
    found = _by_rows(partial(_frequency_overlap, policy, params, ids, log_share), sequences, rows)
    drafted: Bool[np.ndarray, "b t"] = np.asarray(drafted_slots(sequences.mask, 0))
    return np.where(drafted, found, 0.0).sum(1) / np.maximum(drafted.sum(1), 1)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _in_windows(
    policy: PolicyConfig,
    config: LayerConfig,
    steps: int,
    ends: tuple[int, ...],
    width: int,
    params: PolicyParams,
    draft: LayerParams,
    sequences: Sequences,
) -> Float[Array, "w c b t"]:
    batch, shared = _batch_of(policy, config.boundaries, params, sequences), shared_with_head(params)
    whole = unrolled_overlap(config, draft, shared, batch, steps).mean(0)
    found = []
    for end in ends:
        part = jax.tree.map(lambda x, at=slice(end - width, end): x[:, at], batch)
        found.append(
            jnp.stack([whole[:, end - width : end], unrolled_overlap(config, draft, shared, part, steps).mean(0)])
        )
    return jnp.stack(found)


def window_overlap(
    policy: PolicyConfig,
    params: PolicyParams,
    reading: Reading,
    rows: Any,
    ends: tuple[int, ...],
    width: int,
    steps: int,
) -> Float[np.ndarray, "w c n"]:
    """Overlap in the windows of `width` slots that end at `ends`, in means of blocks of slots.

    Of each window twice: as part of its row, and with the head reading the window alone and counting positions from its
    start, features and policy being those of the whole row. Slots that the window leaves without much to read, and
    those whose drafts reach beyond it, are left out.
    """
    run = partial(_in_windows, policy, reading.config, steps, ends, width, params, reading.params)
    found = _by_rows(run, as_sequences(rows), 1, axis=2)
    kept = found[..., width // 4 : width - steps - 1]
    block = max(1, min(32, kept.shape[-1] // 4))
    blocks = kept.shape[-1] // block
    return kept[..., : blocks * block].reshape(*kept.shape[:2], -1, block).mean(-1)
