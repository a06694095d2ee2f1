"""The noise of `specrl_jax/rollout/noise.py` once more, in NumPy: Threefry keys, counter bits, Gumbel values.

Threefry-2x32 with 20 rounds is that of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011);
`test_noise.py` checks it against the paper's known answers.
"""

import numpy as np

PURPOSES = {"rollout": 0, "evaluation": 1, "draft_data": 2}
_MASK = 0xFFFFFFFF


def threefry(key, counter):
    """Two 32-bit words from two words of key and two of counter, as Python integers."""
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = ((c + k) & _MASK for c, k in zip(counter, key, strict=True))
    for group in range(5):
        for turn in rotations[group % 2]:
            a = (a + b) & _MASK
            b = ((b << turn | b >> (32 - turn)) & _MASK) ^ a
        a = (a + keys[(group + 1) % 3]) & _MASK
        b = (b + keys[(group + 2) % 3] + group + 1) & _MASK
    return a, b


def sequence_key(seed, purpose, update, row_id, sample, attempt=0):
    """Key of one sequence: the words fold into the key one after another."""
    key = (0, seed)
    for word in (PURPOSES[purpose], update, attempt, row_id, sample):
        key = threefry(key, (0, word))
    return key


def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def bits(key, position, token_id):
    """32 bits of one token at one position of one sequence, as Python integers."""
    place = _mix((position * 0x9E3779B9 + 0x85EBCA6B) & _MASK)
    first = _mix((key[0] + place) & _MASK)
    second = _mix(key[1] ^ _mix((place + first) & _MASK))
    return _mix(_mix((token_id * 0x9E3779B9 + first) & _MASK) ^ second)


def uniform(random_bits):
    """Centre of the cell of width 2**-32 that the bits stand for, float64."""
    return (np.asarray(random_bits, np.float64) + 0.5) * 2.0**-32


def gumbel(key, position, vocab):
    """Noise of tokens `0..vocab-1`, float64."""
    return -np.log(-np.log1p(-uniform([bits(key, position, token) for token in range(vocab)])))
