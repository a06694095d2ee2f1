"""A small policy that knows the built-in texts by heart, and a draft head trained for it: folders made in a minute."""

import jax
import jax.numpy as jnp
import optax

from experiments.checkpoint_readings import as_sequences
from experiments.checkpoint_texts import TEXTS, encode, long_rows
from specrl_jax.data.tokenizers import train_bpe
from specrl_jax.drafters.draft_losses import DraftBatch, DraftLossConfig
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_params import head_config, init_eagle3
from specrl_jax.drafters.eagle3_training import draft_loss
from specrl_jax.drafters.heads import save_drafter, shared_with_head
from specrl_jax.models.config import PolicyConfig, RopeConfig
from specrl_jax.models.huggingface import save_policy
from specrl_jax.models.norm import rms_norm
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import init_params
from specrl_jax.models.policy import forward, grid_batch, token_logits
from specrl_jax.rl.optimizers import OptimizerConfig, apply_gradients, make_optimizer

VOCAB, ROWS, WIDTH, BATCH, PLAIN = 384, 64, 256, 4, Numerics("plain")
# All angles of so small a base occur within a row, so that longer prompts show none that training did not.
POLICY = PolicyConfig(
    family="qwen3",
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=192,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=8192,
    rope=RopeConfig(theta=100.0),
)
HEAD = head_config(POLICY, VOCAB, (1, 2))
LOUDER = 8.0


def trained(loss, weights, batches, steps):
    """`weights` after so many steps."""
    muon = OptimizerConfig(0.02, name="muon", warmup_steps=5, schedule="linear", adam_learning_rate=0.01)
    optimizer = make_optimizer(muon.for_updates(steps))

    @jax.jit
    def step(weights, state, batch):
        value, gradient = jax.value_and_grad(loss)(weights, batch)
        weights, state, _ = apply_gradients(optimizer, weights, state, gradient)
        return weights, state, value

    state = optimizer.init(weights)
    for i in range(steps):
        weights, state, value = step(weights, state, batches(i))
    return weights, float(value)


def streams(params, tokens, boundaries=()):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return forward(params, POLICY, grid_batch(tokens, positions), numerics=PLAIN, boundaries=boundaries)


def policy_loss(params, tokens):
    logits = token_logits(POLICY, (params.final_norm, params.head), streams(params, tokens).hidden)
    logits = logits.reshape(*tokens.shape, -1)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def trained_policy(tokens, steps):
    part = lambda i: tokens[(BATCH * i + jnp.arange(BATCH)) % ROWS]  # noqa: E731
    return trained(policy_loss, init_params(jax.random.key(0), POLICY), part, steps)


def trained_head(params, tokens, steps, head=HEAD):
    """A head whose hidden state is `LOUDER` than it would be by itself, as those of large policies are."""

    @jax.jit
    def batch_of(tokens):
        out = streams(params, tokens, head.boundaries)
        states = rms_norm(out.hidden, params.final_norm, POLICY.rms_norm_eps)
        features, states = (x.reshape(*tokens.shape, -1) for x in (out.features, states))
        return DraftBatch(tokens, features, states, jnp.ones(tokens.shape, bool))

    part = lambda i: batch_of(tokens[(BATCH * i + jnp.arange(BATCH)) % ROWS])  # noqa: E731
    shared, features = shared_with_head(params), part(0).features
    draft = init_eagle3(jax.random.key(1), head, None, params, float(jnp.sqrt(jnp.mean(features**2))))

    def loss(weights, batch):
        return draft_loss(weights, draft.target_ids, shared, batch, head, DraftLossConfig(steps=3))[0]

    weights, value = trained(loss, draft.weights, part, steps)
    louder = {name: LOUDER * getattr(weights, name) for name in ("fc", "o_proj", "down_proj")}
    return draft.replace(weights=weights.replace(**louder)), value


def make_pair(folder, policy_steps=120, head_steps=120):
    """`folder`/policy and `folder`/drafter."""
    tokenizer = train_bpe([text for pair in TEXTS for text in pair], VOCAB)
    tokens = as_sequences(long_rows(encode(tokenizer, 512), ROWS, WIDTH, 0)).tokens
    params, policy_value = trained_policy(tokens, policy_steps)
    save_policy(folder / "policy", params, POLICY, tokenizer)
    draft, value = trained_head(params, tokens, head_steps)
    save_drafter(folder / "drafter", Eagle3Drafter(HEAD), draft)
    return policy_value, value
