"""Log-probs and entropy in chunks of tokens: the numbers of the whole, and never the law of all tokens at once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import array_sizes, equations
from tiny import INVARIANT, PLAIN, POLICY

from experiments.setup import draft_head_config
from specrl_jax.drafters.draft_losses import DraftLossConfig
from specrl_jax.drafters.heads import init_head, shared_with_head
from specrl_jax.errors import InputError
from specrl_jax.models.params import init_params
from specrl_jax.parallel.mesh import make_mesh, parse_mesh
from specrl_jax.rl.drafting import DraftTraining
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Sequences

pytestmark = pytest.mark.ci

WIDE = replace(POLICY, vocab_size=300)
ROWS, WIDTH, CHUNK = 3, 14, 5


def sequences(dtype):
    keys = jax.random.split(jax.random.key(0), 2)
    lengths = jnp.asarray([14, 9, 11], jnp.int32)
    slot = jnp.arange(WIDTH, dtype=jnp.int32)[None]
    tokens = jax.random.randint(keys[0], (ROWS, WIDTH), 0, WIDE.vocab_size, jnp.int32)
    mask = (slot >= 3) & (slot < lengths[:, None])
    return Sequences(tokens, lengths, mask, jnp.zeros((ROWS, WIDTH), dtype), jnp.full((ROWS, WIDTH), -5.5, dtype), None)


@pytest.mark.parametrize(
    "law",
    [SamplingLaw(0.7), SamplingLaw(top_p=0.9), SamplingLaw(repetition_penalty=1.3)],
    ids=["plain", "filtered", "penalised"],
)
@pytest.mark.parametrize("numerics", [PLAIN, INVARIANT], ids=["plain", "invariant"])
def test_chunks_change_nothing(numerics, law):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), init_params(jax.random.key(1), WIDE))
        given = sequences(jnp.float64)

        def value(chunk):
            scorer = Scorer(WIDE, law, numerics, chunk=chunk)

            def loss(params):
                scores = scorer.score(params, given)
                weights = jnp.where(given.mask, jnp.cos(jnp.arange(given.tokens.size)).reshape(given.tokens.shape), 0.0)
                return jnp.sum(weights * (scores.log_probs + 0.1 * scores.entropy)), scores

            return jax.value_and_grad(loss, has_aux=True)

        ours, whole = (jax.jit(value(chunk))(params) for chunk in (CHUNK, 1024))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10), ours, whole)
        sizes = [array_sizes(value(chunk), params) for chunk in (CHUNK, 1024)]
    laws = ROWS * WIDTH * WIDE.vocab_size
    assert max(sizes[1]) >= laws
    assert max(sizes[0]) <= max(CHUNK * WIDE.vocab_size, max(x.size for x in jax.tree.leaves(params)))


def test_remat_computes_every_layer_again():
    given, params = sequences(jnp.float32), init_params(jax.random.key(1), WIDE)

    def recomputed(remat):
        scorer = Scorer(WIDE, SamplingLaw(), PLAIN, remat)
        gradient = jax.grad(lambda params: scorer.score(params, given).log_probs.sum())
        found = equations(gradient, params)
        again = sum(equation.primitive.name in ("remat", "remat2", "checkpoint") for equation in found)
        return again, [equation.params["length"] for equation in found if equation.primitive.name == "scan"]

    assert recomputed(False) == (0, [])
    # Forward and backward are a loop over the layers each, and the body of the second computes a layer again.
    assert recomputed(True) == (1, [WIDE.num_layers] * 2)


def test_a_chunk_is_at_least_a_token():
    with pytest.raises(InputError, match="chunk of the training forward is 0; it must be at least 1 token"):
        Scorer(WIDE, SamplingLaw(), PLAIN, chunk=0)


def test_a_draft_update_makes_the_policy_s_law_once():
    """Over the whole vocabulary; what is trained reads it over the draft vocabulary."""
    params, given = init_params(jax.random.key(1), WIDE), sequences(jnp.float32)
    head, scorer = draft_head_config(WIDE, 64), Scorer(WIDE, SamplingLaw(), PLAIN)
    training = DraftTraining(scorer, head, DraftLossConfig(2), OptimizerConfig(1e-2), MicrobatchConfig(ROWS, (1.0,)))
    draft, mesh = init_head(jax.random.key(2), head, params, np.arange(64)), make_mesh(parse_mesh("data=1"))
    examples = training.examples(params, given)

    def update(draft):
        return training.update(mesh, draft, training.init(draft), shared_with_head(params), examples)

    made = [e.outvars for e in equations(update, draft) if e.primitive.name in ("dot_general", "ffi_call")]
    products = [out.aval.shape for outs in made for out in outs]
    assert sum(WIDE.vocab_size in shape for shape in products) == 1
    assert sum(64 in shape for shape in products) >= 4


def test_a_draft_update_does_not_depend_on_order_and_microbatches():
    """Sequences from the shortest to the longest all together, and in another order one by one."""
    params, given = init_params(jax.random.key(1), WIDE), sequences(jnp.float32)
    head, scorer = draft_head_config(WIDE, 64), Scorer(WIDE, SamplingLaw(), PLAIN)
    draft, mesh = init_head(jax.random.key(2), head, params, np.arange(64)), make_mesh(parse_mesh("data=1"))

    def updated(rows, order):
        microbatch = MicrobatchConfig(rows, (1.0,))
        training = DraftTraining(scorer, head, DraftLossConfig(2), OptimizerConfig(1e-2), microbatch)
        examples = jax.tree.map(lambda x: x[jnp.asarray(order)], training.examples(params, given))
        shared = shared_with_head(params)
        return jax.jit(lambda draft: training.update(mesh, draft, training.init(draft), shared, examples)[2])(draft)

    whole, parts = updated(ROWS, [0, 1, 2]), updated(1, [2, 0, 1])
    for name in ("draft_loss", "draft_grad_norm", "draft_agreement", "draft_overlap"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-5)
