"""What the controller's plans take at the prices of a table, beside fixed numbers of drafts at the same prices.

Rounds are counted in place of timed, and drafts accepted by coins, so that nothing but the planning is seen.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import POLICY, keys_of, random_eagle3, tiny_params, tiny_prompts

from experiments.bench_models import SyntheticMatch
from specrl_jax.models.numerics import Numerics
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import default_bodies, initial_control
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw

pytestmark = pytest.mark.ci
FIXED = (1, 3, 5, 7)
LONGEST, NEW, SAMPLES, SEEDS = 7, 96, 3, 4
PROMPTS = tiny_prompts()
BODIES = default_bodies(1, LONGEST)


@lru_cache
def rollout_of(survival, drafts, adaptive=False):
    """A rollout of sequences of one length through one row, with drafts of a survival: all arms meet the same coins."""
    config = RolloutConfig(
        NEW,
        SAMPLES,
        drafts,
        SamplingLaw(temperature=0.0, end_ids=(1,), min_new_tokens=NEW),
        SyntheticMatch(survival=survival),
        adaptive=adaptive,
        rows=1,
        smallest_rung=1,
    )
    engine = RolloutEngine(POLICY, config, Numerics(), random_eagle3()[0])
    program, draft = jax.jit(engine.rollout), random_eagle3()[1]

    def rollout(seed, *control):
        keys = keys_of(PROMPTS, SAMPLES, seed=seed)
        return jax.device_get(program(tiny_params(), draft, PROMPTS, keys, None, *control))

    return rollout


def price_of(tokens, token_price):
    return 1.0 + token_price * (np.asarray(tokens) - 1)


def fixed(survival, token_price):
    """Price per token of fixed numbers of drafts; without any it is that of a round."""
    prices = [1.0]
    for drafts in FIXED:
        taken = [rollout_of(survival, drafts)(seed) for seed in range(SEEDS)]
        rounds, tokens = sum(int(t.stats.steps) for t in taken), sum(int(t.lengths.sum()) for t in taken)
        prices.append(rounds * price_of(1 + drafts, token_price) / tokens)
    return np.array(prices)


def planned(survival, token_price, believed=None):
    """Price per token of the controller, who believes in a table of prices, in the rollouts after its first."""
    prices = price_of([body.tokens for body in BODIES], token_price)
    control, price, tokens = initial_control(prices if believed is None else believed), 0.0, 0
    for seed in (SEEDS, *range(SEEDS)):
        taken = rollout_of(survival, LONGEST, adaptive=True)(seed, control)
        control = jax.tree.map(jnp.asarray, taken.control)
        if seed < SEEDS:
            price += float(taken.stats.bodies @ prices)
            tokens += int(taken.lengths.sum())
    return price / tokens


@pytest.mark.parametrize(("survival", "token_price"), [(0.9, 0.03), (0.766, 0.08), (0.2, 0.4)])
def test_plans_are_as_good_as_the_best_fixed_number_of_drafts(survival, token_price):
    prices = fixed(survival, token_price)
    assert planned(survival, token_price) <= prices.min() / 0.97
    assert prices.max() > prices.min() / 0.9  # there is something to plan


def test_with_wrong_prices_plans_are_worse():
    """So that the figure of the test above says something: a table that calls four tokens as cheap as one."""
    prices = fixed(0.2, 0.4)
    assert prices.argmin() == 0
    believed = np.array([1.0 if body.tokens <= 4 else 9.0 for body in BODIES])
    assert planned(0.2, 0.4, believed) > prices.min() / 0.9
