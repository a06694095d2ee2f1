"""Inputs for attention over pages, and what float64 makes of them."""

import jax.numpy as jnp
import numpy as np

ROWS, GROUPS, SHARED, WIDTH, PAGE, PAGES = 3, 2, 4, 32, 16, 6


def random_inputs(queries, dtype=np.float32):
    """Queries, pages of keys and values (slots before width), and a table of pages of a few rows."""
    rng = np.random.default_rng(queries)
    pool = (ROWS * PAGES, GROUPS, PAGE, WIDTH)
    keys, values = (jnp.asarray(rng.normal(size=pool), dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(ROWS, queries, GROUPS * SHARED, WIDTH)), dtype)
    table = rng.permutation(ROWS * PAGES).reshape(ROWS, PAGES).astype(np.int32)
    return q, keys, values, table


def chain_reads(queries):
    """Slots that queries one after the other read, the last of a row being padding, as `below` and as lists."""
    below = np.array([5, 80, 17])[:, None] + np.arange(queries)
    below[1, 1:] = 0  # padding
    return below, [[list(range(count)) for count in row] for row in below]


def tree_masks(tree, root=30):
    """The same of the nodes of a tree in the first two rows: `below`, `bits`, `ends`, and lists."""
    seen = [[root + j for j in range(tree.size) if tree.sees[i][j]] for i in range(tree.size)]
    reads = [[list(range(root)) + own for own in seen]] * 2 + [[[] for _ in seen]]
    words = [sum(1 << (slot - root) for slot in own) for own in seen]
    below = np.array([[root], [root], [0]]) + np.zeros((1, tree.size), int)
    bits = np.array([words, words, [0] * tree.size])
    return below, bits, [root + tree.size] * 2 + [0], reads


def attention_by_hand(q, keys, values, table, reads):
    """Float64 attention; `reads[r, i]` are the slots that query `i` of row `r` reads."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    out = np.zeros(q.shape)
    for row, queries in enumerate(reads):
        for i, slots in enumerate(queries):
            pages, offsets = table[row][np.array(slots, int) // PAGE], np.array(slots, int) % PAGE
            for head in range(q.shape[2]) if slots else ():
                k, v = (pool[pages, head // SHARED, offsets] for pool in (keys, values))
                scores = k @ q[row, i, head] / np.sqrt(WIDTH)
                weights = np.exp(scores - scores.max())
                out[row, i, head] = weights @ v / weights.sum()
    return out
