"""A drafter that has been idle for longer than its ring holds: what it reads when it drafts again."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_adaptive import engine_of
from tiny import POLICY, random_eagle3, tiny_params

from specrl_jax.rollout import queue as queue_module
from specrl_jax.rollout.control import Body, initial_control
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.costs import _forced, standing_batch

pytestmark = pytest.mark.ci
BODIES = (Body(3, 3), Body(3, 12))
CONTEXT, WINDOW = 8, 5


@pytest.fixture
def batch(monkeypatch):
    """Three rows in the middle of their responses, and a ring of five pairs."""
    monkeypatch.setattr(queue_module, "_WINDOW", WINDOW)
    law = SamplingLaw(end_ids=(1,), min_new_tokens=20)  # no row ends
    engine = engine_of(bodies=BODIES, law=law)
    return engine, standing_batch(engine, 3, CONTEXT, initial_control(np.ones(2)))


def test_the_last_pairs_of_an_idle_drafter_lie_in_its_ring(batch):
    engine, batch = batch
    batch = _forced(batch, BODIES, BODIES[0], 0)
    params, draft = tiny_params(), random_eagle3()[1]
    idle = jax.jit(lambda b: replace(engine.planned_round(params, draft, b, 3), plan=b.plan))
    emitted = []
    for _ in range(12):
        batch = idle(batch)
        emitted.append(np.asarray(batch.rows.last_token))
    np.testing.assert_array_equal(batch.rows.unread.count, [12] * 3)
    for position in range(CONTEXT + 12 - WINDOW, CONTEXT + 12):
        ours = batch.rows.unread.tokens[:, position % WINDOW]
        np.testing.assert_array_equal(ours, emitted[position - CONTEXT])


@pytest.mark.parametrize("counts", [(0, 3, 5), (6, 12, 2), (23, 5, 6)])
def test_what_was_lost_is_not_read(batch, counts):
    """As a drafter that has never seen what came before the ring's first pair, at the same positions."""
    engine, batch = batch
    drafter, draft = random_eagle3()
    rng, embed, most = np.random.RandomState(0), tiny_params().embed, max(counts)
    width = len(engine.boundaries) * POLICY.hidden_size
    tokens = rng.randint(0, POLICY.vocab_size, (3, most)).astype(np.int32)
    features = rng.randn(3, most, width).astype(np.float32)

    def read(state, first, last):
        """Pairs from one number to another of every row, those at hand."""
        size = max(last - first)
        index = np.minimum(first[:, None] + np.arange(size), most - 1)
        taken = np.take_along_axis(tokens, index, 1), np.take_along_axis(features, index[..., None], 1)
        return drafter.commit(draft, embed, state, *map(jnp.asarray, taken), jnp.asarray(last - first, jnp.int32))

    before = batch.rows.drafter
    assert np.all(before.length == CONTEXT)
    before = replace(before, keys=before.keys + 1.0, values=before.values + 1.0)  # what was read earlier is something
    ring_tokens = np.zeros((3, WINDOW), np.int32)
    ring_features = np.zeros((3, WINDOW, width), np.float32)
    for row, count in enumerate(counts):
        for pair in range(count):
            slot = (CONTEXT + pair) % WINDOW
            ring_tokens[row, slot], ring_features[row, slot] = tokens[row, pair], features[row, pair]
    count = jnp.asarray(counts, jnp.int32)
    unread = replace(batch.rows.unread, tokens=ring_tokens, features=ring_features, count=count)
    rows = replace(batch.rows, drafter=before, unread=unread)
    ours = jax.jit(engine.catch_up)(tiny_params(), draft, rows)
    np.testing.assert_array_equal(ours.unread.count, [0] * 3)

    last = np.asarray(counts)
    lost = np.maximum(last - WINDOW, 0)
    fresh = drafter.init_state(3, before.keys.shape[2])
    fresh = replace(fresh, length=before.length + lost, start=before.length + lost)
    anew, on = read(fresh, lost, last), read(before, np.zeros(3, np.int64), np.minimum(last, WINDOW))
    for row, count in enumerate(counts):
        state = anew if count > WINDOW else on
        start, end = (CONTEXT + count - WINDOW, CONTEXT + count) if count > WINDOW else (0, CONTEXT + count)
        assert (int(ours.drafter.start[row]), int(ours.drafter.length[row])) == (start, end)
        np.testing.assert_allclose(ours.drafter.hidden[row], state.hidden[row], rtol=1e-5, atol=1e-6)
        for name in ("keys", "values"):
            mine, theirs = (getattr(x, name)[row, :, start:end] for x in (ours.drafter, state))
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
