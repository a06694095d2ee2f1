"""Match verification and trees: the draws decide alone, for every assignment of draws and drafts."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_laws import FILTERS, along, argmax_law, tables

from specrl_jax.models.tree import Tree
from specrl_jax.rollout.verification import cut, match

pytestmark = pytest.mark.ci


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def pairs_with_noise(log_p, log_q):
    """Every (policy's draw, draft) that shared noise can lead to under two laws, with such noise: `[(y, d, noise)]`."""
    found = []
    for y, d in itertools.product(np.flatnonzero(log_p > -np.inf), np.flatnonzero(log_q > -np.inf)):
        # The draw prefers y and the draft d: log p_y > log p_d + x and log q_d + x > log q_y for noise x at d.
        low, high = max(log_q[y] - log_q[d], -40.0), min(log_p[y] - log_p[d], 40.0)
        if y != d and not low < high:
            continue
        noise = np.full(len(log_p), -1e3)
        noise[y] = 0.0
        noise[d] = 0.0 if y == d else (low + high) / 2
        found.append((y, d, noise))
    return found


@pytest.mark.parametrize("proposal", ["sampled", "argmax", "subset"])
@pytest.mark.parametrize(
    ("vocab", "k", "name"),
    [(2, 3, "none"), (3, 3, "none"), (6, 1, "none"), *((4, 2, name) for name in FILTERS if name != "none")],
)
def test_match_emits_the_autoregressive_tokens_for_every_noise(vocab, k, name, proposal, float64):
    p, q = tables(FILTERS[name], vocab, k + 1, 1), tables(FILTERS[name], vocab, k, 2)
    if vocab == 2 and proposal == "subset":
        pytest.skip("a draft vocabulary of one token")
    if proposal == "argmax":
        q = [argmax_law(x) for x in q]
    if proposal == "subset":
        q = tables(replace(FILTERS[name], forbidden=(*FILTERS[name].forbidden, vocab - 1)), vocab, k, 2)
    cases = [((), ())]  # drafts so far, noise so far
    for depth in range(k):
        cases = [
            ((*drafts, d), (*noise, array))
            for drafts, noise in cases
            for _, d, array in pairs_with_noise(p[depth][drafts], q[depth][drafts])
        ]
    last = [np.where(np.arange(vocab) == y, 0.0, -1e3) for y in range(vocab)]
    cases = [(drafts, (*noise, array)) for drafts, noise in cases for array in last]
    drafts, noise = (np.array(x) for x in zip(*cases, strict=True))
    drafts = drafts.astype(np.int32)
    # The drafts are what the noise leads the drafter to, and the draws are those of the policy on them.
    for i in range(k):
        np.testing.assert_array_equal((along(q, drafts)[:, i] + noise[:, i]).argmax(-1), drafts[:, i])
    draws = (along(p, drafts) + noise).argmax(-1).astype(np.int32)
    out = match(Tree.chain(k), jnp.asarray(drafts), jnp.asarray(draws))
    plain = np.zeros((len(noise), 0), np.int32)
    for i in range(k + 1):
        plain = np.c_[plain, (along(p[: i + 1], plain)[:, i] + noise[:, i]).argmax(-1)]
    emitted = np.arange(k + 1) <= np.asarray(out.accepted)[:, None]
    np.testing.assert_array_equal(np.asarray(out.tokens)[emitted], plain[emitted])
    assert set(np.asarray(out.accepted).tolist()) == set(range(k + 1))


TREES = {
    "chain": Tree.chain(2),
    "two, depth 1": Tree.comb(1, 2),
    "three, depth 1": Tree.comb(1, 3),
    "two, comb": Tree.comb(2, 2),
    "three, comb": Tree.comb(2, 3),
    "two, full": Tree.full(2, 2),
    "three, full": Tree.full(2, 3),
    "uneven": Tree((0, 0, 0, 2, 2)),
}


def tree_assignments(tree, vocab, most=200_000):
    """Drafts `[r, n]` with siblings apart, and draws `[r, n + 1]`: all of them, or many at random."""
    families = [len(tree.children(node)) for node in range(tree.size) if tree.children(node)]
    siblings = [list(itertools.permutations(range(vocab), count)) for count in families]
    total = np.prod([len(x) for x in siblings], dtype=float) * float(vocab) ** tree.size
    if total <= most:
        combined = itertools.product(itertools.product(*siblings), itertools.product(range(vocab), repeat=tree.size))
        rows = [(sum(drafts, ()), draws) for drafts, draws in combined]
        return [np.array(x, np.int32) for x in zip(*rows, strict=True)]
    rng = np.random.default_rng(0)
    drafts = np.concatenate([np.array(x)[rng.integers(len(x), size=most)] for x in siblings], axis=1)
    return drafts.astype(np.int32), rng.integers(vocab, size=(most, tree.size), dtype=np.int32)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("vocab", [4, 6])
def test_a_tree_emits_the_draws_along_its_accepted_path(name, vocab):
    tree = TREES[name]
    drafts, draws = tree_assignments(tree, vocab)
    out = jax.jit(match, static_argnums=0)(tree, jnp.asarray(drafts), jnp.asarray(draws))
    # The definition, row by row at once: while a child of the node holds the draw made there, go to it.
    rows, node, alive = np.arange(len(drafts)), np.zeros(len(drafts), int), np.ones(len(drafts), bool)
    accepted, tokens = np.zeros(len(drafts), int), [draws[:, 0]]
    for _ in range(tree.depth):
        child = np.full(len(drafts), -1)
        for i, parent in enumerate(tree.parents):
            child = np.where((node == parent) & (drafts[:, i] == draws[rows, node]), i + 1, child)
        alive &= child > 0
        node = np.where(alive, child, node)
        accepted += alive
        tokens.append(draws[rows, node])
    emitted = np.arange(tree.depth + 1) <= accepted[:, None]
    np.testing.assert_array_equal(out.accepted, accepted)
    np.testing.assert_array_equal(np.asarray(out.tokens)[emitted], np.stack(tokens, 1)[emitted])
    assert set(accepted) == set(range(tree.depth + 1))
    if out.path is not None:
        # The path goes from the root down, one parent after the other, and its drafts are what was emitted.
        path = np.asarray(out.path)
        parents = np.array([-1, *tree.parents])
        below = (np.arange(tree.depth + 1) <= accepted[:, None])[:, 1:]
        np.testing.assert_array_equal(parents[path[:, 1:]][below], path[:, :-1][below])
        np.testing.assert_array_equal(
            np.take_along_axis(drafts, np.maximum(path[:, 1:] - 1, 0), 1)[below], np.asarray(out.tokens)[:, :-1][below]
        )


def test_trees_are_what_their_parents_say():
    assert Tree.chain(3).parents == (0, 1, 2)
    assert Tree.comb(2, 3).parents == (0, 0, 0, 1, 1, 1)
    assert Tree.full(2, 2).parents == (0, 0, 1, 1, 2, 2)
    tree = Tree.full(2, 2)
    assert tree.depths == (0, 1, 1, 2, 2, 2, 2)
    assert tree.leaf_paths == ((0, 1, 3), (0, 1, 4), (0, 2, 5), (0, 2, 6))
    assert tree.sees[4].tolist() == [True, True, False, False, True, False, False]
    assert Tree.comb(3, 1) == Tree.chain(3)
    for parents in ((1,), (0, 3), (0, 1, 0)):
        with pytest.raises(ValueError, match=r"parents|order of depth"):
            Tree(parents)


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
    tree = Tree.chain(num_drafts)
    decide = jax.jit(lambda drafts, draws, **kw: cut(match(tree, drafts, draws), **kw))
    verdict = decide(drafts, draws, ends=jnp.asarray(ends), room=room)
    expected = [one_round(*row) for row in zip(*map(np.asarray, (drafts, draws, ends, room)), strict=True)]
    accepted, counts, was_cut = np.array(expected).T
    np.testing.assert_array_equal(verdict.accepted, accepted)
    np.testing.assert_array_equal(verdict.counts, counts)
    np.testing.assert_array_equal(verdict.cut, was_cut)
    # All outcomes occur: nothing accepted, everything, and cuts where there are drafts.
    assert set(accepted) == set(range(num_drafts + 1))
    assert set(was_cut) == ({0, 1} if num_drafts else {0})


def test_a_finished_row_emits_nothing():
    tokens = jnp.zeros((2, 3), jnp.int32)
    proposed = match(Tree.chain(2), tokens[:, :2], tokens)
    verdict = cut(proposed, ends=jnp.array([[True] * 3, [False] * 3]), room=jnp.zeros(2, jnp.int32))
    np.testing.assert_array_equal(verdict.counts, [0, 0])
    np.testing.assert_array_equal(verdict.accepted, [0, 0])
