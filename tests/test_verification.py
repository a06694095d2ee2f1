"""Match verification against a plain loop over the tokens of a round, by enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.rollout.verification import match

pytestmark = pytest.mark.ci


def one_round(drafts, draws, ends, room):
    """Tokens emitted one by one: `(accepted, emitted, cut)`.

    The policy's draw is emitted. The round goes on while the draw equals the draft; it is cut when it
    would go on but the draw was an end token or was the last that fits.
    """
    emitted = accepted = 0
    while True:
        is_draft = emitted < len(drafts) and drafts[emitted] == draws[emitted]
        accepted += is_draft
        is_end = ends[emitted]
        emitted += 1
        if not is_draft:
            return accepted, emitted, False
        if is_end or emitted == room:
            return accepted, emitted, True


def enumerate_rounds(drafts, vocab, max_room):
    """Every combination of drafts, draws, end flags of the draws and room (at least 1)."""
    every = itertools.product(range(vocab), repeat=2 * drafts + 1)
    flags = list(itertools.product((False, True), repeat=drafts + 1))
    rows = [(t[:drafts], t[drafts:], f, room) for t in every for f in flags for room in range(1, max_room + 1)]
    return [np.array(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(("num_drafts", "vocab"), [(0, 2), (1, 3), (2, 3), (3, 2)])
def test_match_equals_the_loop(num_drafts, vocab):
    drafts, draws, ends, room = enumerate_rounds(num_drafts, vocab, num_drafts + 2)
    arrays = (x.astype(np.int32) for x in (drafts.reshape(len(room), num_drafts), draws, room))
    drafts, draws, room = (jnp.asarray(x) for x in arrays)
    verdict = jax.jit(match)(drafts, draws, ends=jnp.asarray(ends), room=room)
    expected = [one_round(*row) for row in zip(*map(np.asarray, (drafts, draws, ends, room)), strict=True)]
    accepted, counts, cut = np.array(expected).T
    np.testing.assert_array_equal(verdict.accepted, accepted)
    np.testing.assert_array_equal(verdict.counts, counts)
    np.testing.assert_array_equal(verdict.cut, cut)
    # All outcomes occur: nothing accepted, everything, and cuts where there are drafts.
    assert set(accepted) == set(range(num_drafts + 1))
    assert set(cut) == ({0, 1} if num_drafts else {0})


def test_a_finished_row_emits_nothing():
    tokens = jnp.zeros((2, 3), jnp.int32)
    verdict = match(tokens[:, :2], tokens, ends=jnp.array([[True] * 3, [False] * 3]), room=jnp.zeros(2, jnp.int32))
    np.testing.assert_array_equal(verdict.counts, [0, 0])
    np.testing.assert_array_equal(verdict.accepted, [0, 0])
