"""Laws of small vocabularies that depend on the prefix, for exact enumeration."""

import itertools

import jax.numpy as jnp
import numpy as np

from specrl_jax.rollout.sampling import Context, SamplingLaw

FILTERS = {
    "none": SamplingLaw(),
    "temperature": SamplingLaw(0.6),
    "top-k": SamplingLaw(1.2, top_k=2),
    "top-p": SamplingLaw(0.9, top_p=0.7),
    "min-p": SamplingLaw(min_p=0.3),
    "penalty": SamplingLaw(repetition_penalty=2.5),
    "minimum": SamplingLaw(min_new_tokens=1, end_ids=(0,)),
    "all": SamplingLaw(0.8, top_k=3, top_p=0.9, min_p=0.1, forbidden=(1,)),
}


def tables(law, vocab, depth, seed):
    """`tables[i][prefix]` is a log-law over the token after the `i` tokens of `prefix`, for random logits."""
    rng = np.random.default_rng(seed)
    result = []
    for i in range(depth):
        logits = jnp.asarray(rng.normal(scale=1.5, size=(vocab**i, vocab)))
        prefixes = np.array(list(itertools.product(range(vocab), repeat=i)), np.int32).reshape(vocab**i, i)
        seen = (prefixes[:, :, None] == np.arange(vocab)).any(axis=1)
        context = Context(jnp.full((vocab**i,), i, jnp.int32), jnp.asarray(seen))
        log_law = np.asarray(law.log_law(logits, context, jnp.arange(vocab)))
        result.append(log_law.reshape(*[vocab] * i, vocab))
    return result


def along(tables_, drafts):
    """The law at every place of each row of drafts, `[r, places, v]`."""
    laws = [table[tuple(drafts[:, :i].T)] + np.zeros((len(drafts), 1)) for i, table in enumerate(tables_)]
    return np.stack(laws, axis=1)


def argmax_law(log_law):
    """The law of a drafter that takes its most probable token."""
    with np.errstate(divide="ignore"):
        return np.log(np.eye(log_law.shape[-1])[log_law.argmax(-1)])
