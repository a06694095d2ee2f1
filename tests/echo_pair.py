"""A policy and a draft head made by hand, which say again what stood a few tokens before, at any position.

Both find it by position alone: queries and keys are the same for all tokens, and their product peaks at one distance.
So they need no training, nothing changes along a prompt however long, and a head whose positions stop is lost.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_params import head_config, init_eagle3
from specrl_jax.drafters.heads import save_drafter
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import save_policy
from specrl_jax.models.params import init_params
from specrl_jax.models.rope import inverse_frequencies

WIDTH, BACK, LOUD = 64, 5, 20.0
"""Of a token's code and of its keys; the distance that is looked back; how much the answer drowns the token itself."""


def echo_policy(vocab_size):
    return PolicyConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=WIDTH,
        max_position_embeddings=8192,
    )


def _codes(vocab_size):
    """A random sign per channel, and a first channel that is the same for all tokens."""
    codes = np.random.default_rng(0).choice([-1.0, 1.0], (vocab_size, WIDTH))
    codes[:, 0] = 8.0
    return jnp.asarray(codes, jnp.float32)


def _kernels(config):
    """Projections whose scores are `12 * sum cos(f * (distance - BACK))`, and that pass the codes on."""
    angles = BACK * inverse_frequencies(config.rope, WIDTH)[0]
    key = np.concatenate([np.ones_like(angles), np.zeros_like(angles)])
    query = np.concatenate([np.cos(angles), -np.sin(angles)])
    first = np.eye(WIDTH)[:1]
    rest = np.eye(WIDTH) - first.T @ first
    # The constant channel is 5.7 after the norm.
    loud = np.sqrt(12 * np.sqrt(WIDTH)) / 5.7
    kernels = {"q_proj": loud * query[:, None] @ first, "k_proj": loud * key[:, None] @ first}
    kernels |= {"v_proj": rest, "o_proj": LOUD * rest}
    return {name: jnp.asarray(kernel, jnp.float32) for name, kernel in kernels.items()}


def make_echo(folder, tokenizer, stops=None):
    """`folder`/policy and `folder`/drafter, whose config.json ends its positions at `stops`."""
    policy = echo_policy(len(tokenizer))
    codes, kernels = _codes(policy.vocab_size), _kernels(policy)
    rows = 0.4 * codes.at[:, 0].set(0.0)
    params = init_params(jax.random.key(0), policy)
    (layer,) = params.layers
    layer = layer.replace(**kernels, down_proj=jnp.zeros_like(layer.down_proj))
    save_policy(folder / "policy", params.replace(embed=codes, layers=(layer,), head=rows), policy, tokenizer)
    head = head_config(policy, policy.vocab_size, (1,), norm_before_residual=True)
    head = replace(head, max_position_embeddings=stops or head.max_position_embeddings)
    draft = init_eagle3(jax.random.key(1), head)
    nothing = jnp.zeros((WIDTH, WIDTH))
    reads = {name: jnp.concatenate([kernels[name], nothing], axis=1) for name in ("q_proj", "k_proj", "v_proj")}
    silent = {name: jnp.zeros_like(getattr(draft.weights, name)) for name in ("fc", "hidden_norm", "down_proj")}
    weights = draft.weights.replace(**reads, **silent, o_proj=kernels["o_proj"], lm_head=rows)
    save_drafter(folder / "drafter", Eagle3Drafter(head), draft.replace(weights=weights))
