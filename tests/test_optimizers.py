"""AdamW against torch, Muon against float64 NumPy, and what each parameter gets."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

from specrl_jax.drafters.eagle3_params import Eagle3Config, init_eagle3
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.params import init_params
from specrl_jax.rl.optimizers import (
    OptimizerConfig,
    advance,
    apply_gradients,
    learning_rate_schedule,
    make_optimizer,
    muon_parameters,
)

pytestmark = pytest.mark.ci

NOT_MUON_FIELDS = {
    "embed", "head", "lm_head", "attn_norm", "mlp_norm", "q_norm", "k_norm", "final_norm", "embed_norm", "hidden_norm",
    "q_bias", "k_bias", "v_bias",
}  # fmt: skip


def make_params(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = {"embed": (9, 6), "q_proj": (6, 12), "down_proj": (12, 6), "q_bias": (12,), "final_norm": (6,)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def make_gradients(steps, dtype="float32", scales=(0.05, 3.0, 0.3)):
    """Gradients whose global norms lie on both sides of 1."""
    rng = np.random.default_rng(1)
    shapes = {name: p.shape for name, p in make_params().items()}
    return [
        {name: jnp.asarray(rng.normal(size=shape) * scales[i % 3] / 13, dtype) for name, shape in shapes.items()}
        for i in range(steps)
    ]


def train(config, params, gradients):
    optimizer = make_optimizer(config)
    step = jax.jit(lambda params, state, grads: apply_gradients(optimizer, params, state, grads))
    state, norms = optimizer.init(params), []
    for grads in gradients:
        params, state, norm = step(params, state, grads)
        norms.append(float(norm))
    return params, state, norms


def as_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def clipped(gradients, clip_norm):
    """Each gradient in float64, scaled down to the norm."""
    result = []
    for grads in as_float64(gradients):
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        result.append({name: g * min(1.0, clip_norm / norm) for name, g in grads.items()})
    return result


def test_adamw_matches_torch():
    torch = pytest.importorskip("torch")
    config = OptimizerConfig(
        3e-2, schedule="cosine", warmup_steps=3, total_steps=8, weight_decay=0.1, clip_norm=0.5, b2=0.95
    )
    gradients = make_gradients(7)
    params, _, norms = train(config, make_params(), gradients)

    tensors = {name: torch.tensor(np.asarray(p), dtype=torch.float64) for name, p in make_params().items()}
    groups = [
        {"params": [t for t in tensors.values() if t.ndim == 2], "weight_decay": 0.1},
        {"params": [t for t in tensors.values() if t.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    for step, grads in enumerate(gradients):
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(np.asarray(grads[name]), dtype=torch.float64)
        norm = torch.nn.utils.clip_grad_norm_(list(tensors.values()), 0.5)
        np.testing.assert_allclose(norms[step], norm.item(), rtol=1e-6)
        rate = (step + 1) / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / 5))
        for group in optimizer.param_groups:
            group["lr"] = 3e-2 * rate
        optimizer.step()
    assert min(norms) < 0.5 < max(norms)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(params[name], tensor.numpy(), atol=5e-6, err_msg=name)


def newton_schulz(matrix, steps=5):
    """Jordan's quintic iteration with its published coefficients."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / np.linalg.norm(matrix)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def nesterov_moment(history, decay):
    """Bias-corrected look-ahead of an exponential average (Dozat 2016)."""
    moment, t = 0.0, len(history)
    for g in history:
        moment = decay * moment + (1 - decay) * g
    return decay * moment / (1 - decay ** (t + 1)) + (1 - decay) * history[-1] / (1 - decay**t)


def test_muon_matches_numpy():
    config = OptimizerConfig(
        0.02, name="muon", weight_decay=0.1, clip_norm=0.5, adam_learning_rate=0.003, b1=0.8, b2=0.95, muon_momentum=0.9
    )
    gradients = make_gradients(4)
    params, _, _ = train(config, make_params(), gradients)
    expected = as_float64(make_params())
    history = clipped(gradients, 0.5)
    for t in range(1, 5):
        for name in expected:
            seen = [g[name] for g in history[:t]]
            if name in ("q_proj", "down_proj"):
                fan_out, fan_in = expected[name].shape
                direction = newton_schulz(nesterov_moment(seen, 0.9)) * math.sqrt(max(1, fan_out / fan_in))
                expected[name] = expected[name] - 0.02 * (direction + 0.1 * expected[name])
            else:
                second = sum(0.05 * 0.95 ** (t - 1 - i) * g**2 for i, g in enumerate(seen)) / (1 - 0.95**t)
                expected[name] = expected[name] - 0.003 * nesterov_moment(seen, 0.8) / (np.sqrt(second) + 1e-8)
    for name in expected:
        np.testing.assert_allclose(params[name], expected[name], atol=3e-6, err_msg=name)


def test_muon_update_is_nearly_orthogonal():
    params = {"q_proj": jnp.zeros((48, 16)), "embed": jnp.zeros((16, 48))}
    rng = np.random.default_rng(2)
    # A gradient of condition number 100: without orthogonalisation the update would have it too.
    left, _ = np.linalg.qr(rng.normal(size=(16, 16)))
    right, _ = np.linalg.qr(rng.normal(size=(48, 48)))
    matrix = jnp.asarray(left @ np.diag(np.geomspace(1.0, 0.01, 16)) @ right[:16], jnp.float32)
    new, _, _ = train(OptimizerConfig(1.0, name="muon"), params, [{"q_proj": matrix.T, "embed": matrix}])
    singular = np.linalg.svd(np.asarray(new["q_proj"]) / math.sqrt(48 / 16), compute_uv=False)
    assert singular[:8].max() < 1.3
    assert singular[:8].min() > 0.6
    assert singular[0] / singular[-1] < 6
    # The embedding of the same gradient takes a first Adam step: the same magnitude everywhere.
    np.testing.assert_allclose(np.abs(new["embed"]), np.abs(new["embed"][0, 0]), rtol=0.05)


def names_of(mask):
    """Field name -> what `muon_parameters` says of it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(mask)
    return {path[-1].name: value for path, value in leaves}


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_muon_moves_the_matrices_of_the_policy(family, tied):
    config = PolicyConfig(family, 11, 8, 12, 2, 2, 1, 4, tie_embeddings=tied)
    names = names_of(muon_parameters(init_params(jax.random.key(0), config)))
    assert {name for name, is_muon in names.items() if not is_muon} == set(names) & NOT_MUON_FIELDS
    assert {name for name, is_muon in names.items() if is_muon} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


def test_muon_moves_the_matrices_of_the_draft_head():
    config = Eagle3Config(
        8, 12, 2, 1, 4, vocab_size=11, draft_vocab_size=11, boundaries=(0, 1, 2), target_hidden_size=8
    )
    names = names_of(muon_parameters(init_eagle3(jax.random.key(0), config).weights))
    assert {name for name, is_muon in names.items() if not is_muon} == set(names) & NOT_MUON_FIELDS
    assert names["fc"]
    assert not names["lm_head"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_policy_in_a_scan(name, dtype):
    """Strict promotion, a tree with absent fields, state of one type for a scan, and the same bits each time."""
    params = init_params(
        jax.random.key(0), PolicyConfig("qwen2", 11, 8, 12, 2, 2, 1, 4, tie_embeddings=True, dtype=dtype)
    )
    optimizer = make_optimizer(OptimizerConfig(1e-2, name=name, warmup_steps=2, weight_decay=0.1))

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            new, state, norm = apply_gradients(optimizer, params, state, params)
            return (new, state), norm

        return jax.lax.scan(step, (params, optimizer.init(params)), length=3)

    (first, state), norms = run(params)
    (second, _), _ = run(params)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, params)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(first))
    assert all(leaf.dtype in (jnp.float32, jnp.int32, jnp.bool_) for leaf in jax.tree.leaves(state))
    expected = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(as_float64(params))))
    np.testing.assert_allclose(norms[0], expected, rtol=1e-5)
    moved = jax.tree.map(lambda new, old: bool(jnp.any(new != old)), first.layers, params.layers)
    assert moved[0].q_proj
    assert moved[1].down_proj


def test_bfloat16_second_moment_moves():
    """With b2 = 0.999 a bfloat16 moment rounds back to where it was; a float32 one decays."""
    params, gradients = make_params("bfloat16"), make_gradients(1, "bfloat16")
    zeros = jax.tree.map(jnp.zeros_like, gradients[0])
    _, state, _ = train(OptimizerConfig(1e-3), params, gradients + [zeros] * 20)
    _, before, _ = train(OptimizerConfig(1e-3), params, gradients)
    old, new = (optax.tree.get(s, "nu") for s in (before, state))
    for name, gradient in as_float64(gradients[0]).items():
        np.testing.assert_allclose(old[name], 0.001 * gradient**2, rtol=1e-4)
        np.testing.assert_allclose(new[name], np.asarray(old[name]) * 0.999**20, rtol=1e-4)


def test_clip_scales_down_only_what_is_too_long():
    # A large eps keeps Adam from hiding the length of its first gradient.
    fields = {"learning_rate": 0.1, "eps": 1.0}
    grads = make_gradients(1)[0]
    norm = float(optax.tree.norm(grads))
    reference, _, _ = train(OptimizerConfig(**fields, clip_norm=1e6), make_params(), [grads])
    same, _, norms = train(OptimizerConfig(**fields, clip_norm=norm * 1.01), make_params(), [grads])
    shorter, _, clipped_norms = train(OptimizerConfig(**fields, clip_norm=norm / 4), make_params(), [grads])
    quarter = jax.tree.map(lambda g: g / 4, grads)
    expected, _, _ = train(OptimizerConfig(**fields, clip_norm=1e6), make_params(), [quarter])
    for name in grads:
        np.testing.assert_allclose(same[name], reference[name], rtol=1e-6)
        np.testing.assert_allclose(shorter[name], expected[name], rtol=1e-6)
        assert np.any(shorter[name] != reference[name])
    np.testing.assert_allclose([norms[0], clipped_norms[0]], norm, rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5, 0, 0]),
    ],
)
def test_schedules(schedule, expected):
    config = OptimizerConfig(0.4, schedule=schedule, warmup_steps=4, total_steps=8)
    rates = learning_rate_schedule(config)
    np.testing.assert_allclose([rates(i) for i in range(10)], 0.4 * np.array(expected), atol=1e-7)
    np.testing.assert_allclose(jax.jit(jax.vmap(rates))(jnp.arange(10)), 0.4 * np.array(expected), atol=1e-7)


def test_a_decay_ends_with_the_run():
    config = OptimizerConfig(0.4, schedule="linear", warmup_steps=2)
    rates = learning_rate_schedule(config.for_updates(6))
    np.testing.assert_allclose([rates(i) for i in range(8)], [0.2, 0.4, 0.4, 0.32, 0.24, 0.16, 0.08, 0], atol=1e-7)
    # A run shorter than its warm-up never decays; a total that was given stays.
    assert config.for_updates(1).total_steps == 3
    assert replace(config, total_steps=9).for_updates(6).total_steps == 9
    assert OptimizerConfig(0.4).for_updates(6) == OptimizerConfig(0.4)
    with pytest.raises(ValueError, match="call for_updates first"):
        learning_rate_schedule(config)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_without_warmup_the_first_update_has_the_full_rate(warmup_steps):
    config = OptimizerConfig(0.4, schedule="linear", warmup_steps=warmup_steps, total_steps=warmup_steps + 2)
    assert float(learning_rate_schedule(config)(0)) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"adam_learning_rate": -1e-3}, "adam_learning_rate is -0.001"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"b1": 1.0}, "b1 is 1.0; it must be at least 0 and below 1"),
        ({"b2": -0.1}, "b2 is -0.1"),
        ({"muon_momentum": 1.5}, "muon_momentum is 1.5"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"name": "sgd"}, "name is 'sgd'; choose one of adamw, muon"),
        ({"schedule": "step"}, "schedule is 'step'; choose one of constant, cosine, linear"),
        ({"schedule": "cosine", "total_steps": 0}, "total_steps is 0; schedule cosine needs more of them than the 0"),
        ({"schedule": "linear", "warmup_steps": 5, "total_steps": 5}, "needs more of them than the 5 of the warm-up"),
    ],
)
def test_config_out_of_range(fields, words, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it would refuse an unknown word first
    with pytest.raises(InputError, match=words):
        OptimizerConfig(**{"learning_rate": 1e-3} | fields)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bfloat16_parameters_follow_their_float32_master(name):
    """Steps far below the last bit add up as those of float32 parameters do."""
    config, gradients = OptimizerConfig(2e-3, name=name), make_gradients(1) * 120
    start = make_params("bfloat16")
    wide, state, _ = train(config, jax.tree.map(lambda x: x.astype(jnp.float32), start), gradients)
    assert state.master is None
    narrow, state, _ = train(config, start, gradients)
    jax.tree.map(lambda m, w: np.testing.assert_allclose(m, w, atol=1e-6), state.master, wide)
    jax.tree.map(lambda n, m: np.testing.assert_array_equal(n, m.astype(jnp.bfloat16)), narrow, state.master)
    moved = np.mean(np.asarray(narrow["q_proj"] != start["q_proj"]))
    assert moved > 0.9


def test_an_update_by_itself_is_the_update_in_place():
    """The same numbers as `apply_gradients`, and no second state among the temporaries."""
    params, gradients = make_params("bfloat16"), make_gradients(1)[0]
    optimizer = make_optimizer(OptimizerConfig(1e-2))
    state = optimizer.init(params)
    wide = {"q_proj": jnp.zeros((512, 512), jnp.bfloat16)}

    def alone(params, state, gradients):
        return advance(optimizer, params, state, gradients)

    for ours, theirs in zip(
        jax.tree.leaves(jax.jit(alone)(params, state, gradients)),
        jax.tree.leaves(apply_gradients(optimizer, params, state, gradients)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    program = jax.jit(alone, donate_argnums=(0, 1)).lower(wide, optimizer.init(wide), wide).compile()
    memory = program.memory_analysis()
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(optimizer.init(wide)))
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.temp_size_in_bytes < state_bytes
