"""Tiny policies, prompts and drafters for tests of the rollout."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_params import Eagle3Config, init_eagle3
from specrl_jax.drafters.protocol import Choice, Texts, choose_next, propose_tree
from specrl_jax.models.cache import KVCache, own_pages
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import init_params
from specrl_jax.models.policy import forward, grid_batch, logits, policy_cache
from specrl_jax.rollout.control import initial_control
from specrl_jax.rollout.noise import sequence_keys

VOCAB = 20
POLICY = PolicyConfig(
    family="qwen3",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
)
INVARIANT = Numerics("invariant", token_block=8, row_block=4, query_block=4, key_block=16)
PLAIN = Numerics("plain", key_block=16)


def equal_prices(config, rows):
    """A controller to which all rounds of `rows` rows cost alike."""
    return initial_control(np.ones(len(config.bodies_for(rows))))


@functools.lru_cache
def tiny_params(config=POLICY, seed=0):
    """Random parameters whose law depends on the context and is peaked: 1 to 2 nats of entropy per token."""
    params = init_params(jax.random.key(seed), config)
    if params.head is None:
        return params.replace(embed=params.embed * 10)
    return params.replace(embed=params.embed * 50, head=params.head * 2)


def tiny_prompts(groups=5, width=6, seed=0):
    """Prompts of 1 to `width` tokens, the padding filled with tokens that must not matter."""
    rng = np.random.RandomState(seed)
    lengths = np.resize([width, 1, 3, 2, width - 1], groups)
    return Prompts(
        tokens=jnp.asarray(rng.randint(0, VOCAB, (groups, width)), jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        row_ids=jnp.asarray(1000 + 7 * np.arange(groups), jnp.uint32),
    )


def assert_same(ours, expected, rows=slice(None)):
    """Tokens, lengths and log-probs, bit for bit, of two trajectories."""
    for name in ("lengths", "ended", "tokens", "log_probs"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(expected, name)[rows], err_msg=name)


def keys_of(prompts, samples, *, seed=0, purpose="rollout", update=0):
    """Noise keys of every sequence, group-major."""
    row_ids = jnp.repeat(prompts.row_ids, samples)
    sample_ids = jnp.tile(jnp.arange(samples, dtype=jnp.int32), len(prompts.row_ids))
    return sequence_keys(seed, purpose, update, row_ids, sample_ids)


def take_prompts(prompts, groups):
    """The named prompts, in the order named."""
    return jax.tree.map(lambda x: x[jnp.asarray(groups)], prompts)


@functools.lru_cache
def random_eagle3(config=POLICY, draft_vocab=VOCAB - 4, seed=1):
    """An untrained EAGLE-3 head that cannot propose the whole vocabulary, and its parameters."""
    head = Eagle3Config(
        hidden_size=config.hidden_size,
        intermediate_size=48,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab,
        boundaries=(0, 1, 2),
        target_hidden_size=config.hidden_size,
        dtype=config.dtype,
    )
    target_ids = np.sort(np.random.RandomState(seed).permutation(config.vocab_size)[:draft_vocab])
    return Eagle3Drafter(head), init_eagle3(jax.random.key(seed), head, target_ids)


@struct.dataclass
class LastToken:
    """The newest token of each row."""

    token: Any
    length: Any


@dataclass(frozen=True)
class BigramDrafter:
    """Proposes by a table of logits `[v, v]`, which is its parameter; reads no features."""

    boundaries: tuple = ()

    def init_state(self, rows, capacity):
        return LastToken(jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), jnp.int32))

    def commit(self, params, embed, state, tokens, features, counts):
        last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        return LastToken(jnp.where(counts > 0, last, state.token), state.length + counts)

    def propose(self, params, embed, state, texts, tree, choose):
        ids = jnp.arange(params.shape[0], dtype=jnp.int32)

        def below(nodes, before, count):
            last = before[:, :, -1] if before.shape[2] else state.token[:, None]
            return choose(params[last], ids, before, count)

        return propose_tree(tree, below, len(texts.sequence))


@dataclass(frozen=True)
class ChainBigramDrafter(BigramDrafter):
    """One that can stop after any draft, and pass over pairs."""

    def begin(self, params, embed, state, texts, depth, choose):
        return state.token, self._next(params, state.token, jnp.int32(0), choose)

    def advance(self, params, embed, state, carry, tokens, step, choose):
        return carry, self._next(params, tokens, step + 1, choose)

    def _next(self, params, last, step, choose):
        return choose_next(choose, params[last], jnp.arange(params.shape[0], dtype=jnp.int32), step)

    def skip(self, state, counts):
        return LastToken(state.token, state.length + counts)


def no_texts(rows):
    """For drafters that do not look."""
    nothing = jnp.zeros((rows, 1), jnp.int32)
    ids = jnp.arange(rows, dtype=jnp.int32)
    return Texts(nothing, nothing[:, 0], ids.astype(jnp.uint32), nothing, nothing[:, 0], ids)


@functools.lru_cache
def bigram_table(seed=3):
    return jnp.asarray(np.random.RandomState(seed).randn(VOCAB, VOCAB) * 1.5, jnp.float32)


@struct.dataclass
class ReadTokens:
    """What the policy has read of each row, and its newest token, still unread."""

    keys: Any
    values: Any
    length: Any
    newest: Any

    @staticmethod
    def of(cache, newest):
        """Rows first, as a drafter's state must be: every row has pages of its own."""
        by_row = lambda x: x.reshape(*cache.table.shape, *x.shape[1:])  # noqa: E731
        return ReadTokens(tuple(map(by_row, cache.keys)), tuple(map(by_row, cache.values)), cache.length, newest)

    @property
    def cache(self):
        pooled = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
        table = own_pages(*self.keys[0].shape[:2])
        return KVCache(tuple(map(pooled, self.keys)), tuple(map(pooled, self.values)), table, self.length)


@dataclass(frozen=True)
class PolicyAsDrafter:
    """The policy itself as drafter: with invariant numerics every draft equals the policy's draw.

    Its parameters are `(policy parameters, wrong_from)`; from draft `wrong_from` of a round on,
    drafts are wrong on purpose, so that exactly `wrong_from` of them are accepted.
    """

    config: PolicyConfig
    numerics: Numerics
    boundaries: tuple = (0,)

    def init_state(self, rows, capacity):
        return ReadTokens.of(policy_cache(self.config, rows, capacity, self.numerics), jnp.zeros((rows,), jnp.int32))

    def _read(self, params, cache, tokens, counts):
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = jnp.where(steps < counts[:, None], cache.length[:, None] + steps, -1)
        out = forward(params, self.config, grid_batch(tokens, positions), numerics=self.numerics, cache=cache)
        return out.hidden, out.cache.replace(length=cache.length + counts)

    def commit(self, params, embed, state, tokens, features, counts):
        # Boundary 0 is the embedding of the token before: look it up backwards.
        read = jnp.argmax(jnp.all(features[:, :, None] == embed[None, None], axis=-1), axis=-1).astype(jnp.int32)
        _, cache = self._read(params[0], state.cache, read, counts)
        last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        return ReadTokens.of(cache, jnp.where(counts > 0, last, state.newest))

    def propose(self, params, embed, state, texts, tree, choose):
        assert tree.is_chain
        weights, wrong_from = params
        ids, token, cache = jnp.arange(embed.shape[0], dtype=jnp.int32), state.newest, state.cache
        drafts = jnp.zeros((len(token), 1, 0), jnp.int32)
        for step in range(tree.depth):
            hidden, cache = self._read(weights, cache, token[:, None], jnp.ones_like(token))
            scores = logits(weights, self.config, hidden, self.numerics)[:, None]
            token = choose(scores, ids, drafts, 1).token[:, 0, 0]
            token = jnp.where(step >= wrong_from, (token + 1) % embed.shape[0], token)
            drafts = jnp.concatenate([drafts, token[:, None, None]], axis=2)
        return Choice(drafts[:, 0])


@functools.lru_cache
def _compiled(engine):
    return jax.jit(engine.rollout)


def run(engine, prompts, keys, params, draft=None, program=None):
    """A rollout whose arrays are NumPy's; engines that are equal share one compiled program."""
    draft = draft if engine.speculative else None
    return jax.tree.map(np.asarray, (program or _compiled(engine))(params, draft, prompts, keys))
