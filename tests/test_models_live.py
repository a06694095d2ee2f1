"""The policy against transformers and torch themselves, where they are installed."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models.checkpoints import reference, small_tokenizer, write_checkpoint
from fixtures.models.recipe import CASES, case_name, prompts

from specrl_jax.models.huggingface import load_policy, save_policy
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import init_params
from specrl_jax.models.policy import forward, grid_batch, logits, policy_cache, sequence_positions
from specrl_jax.models.presets import PRESETS
from specrl_jax.models.weights import policy_tensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
PLAIN, INVARIANT = Numerics("plain"), Numerics("invariant", token_block=8, row_block=8, query_block=4, key_block=32)
BOTH = pytest.mark.parametrize("numerics", [PLAIN, INVARIANT], ids=["plain", "invariant"])
FAMILIES = pytest.mark.parametrize("name", ["qwen3-yarn-untied", "qwen2-default-tied", "llama-llama3-untied"])


def load_theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@functools.partial(jax.jit, static_argnums=(1, 3))
def all_logits(params, config, tokens, numerics):
    rows, width = tokens.shape
    batch = grid_batch(tokens, sequence_positions(jnp.full((rows,), width, jnp.int32), width))
    out = forward(params, config, batch, numerics=numerics)
    return logits(params, config, out.hidden, numerics).reshape(rows, width, -1)


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def continue_greedily(params, config, tokens, steps, numerics):
    rows, width = tokens.shape
    cache = policy_cache(config, rows, width + steps, numerics)
    positions = sequence_positions(jnp.full((rows,), width, jnp.int32), width)
    out = forward(params, config, grid_batch(tokens, positions), numerics=numerics, cache=cache)

    def choose(hidden):
        return jnp.argmax(logits(params, config, hidden, numerics), -1).astype(jnp.int32)

    def step(carry, _):
        token, cache = carry
        out = forward(params, config, grid_batch(token[:, None], cache.length[:, None]), numerics=numerics, cache=cache)
        return (choose(out.hidden), out.cache.replace(length=cache.length + 1)), token

    first = choose(out.hidden.reshape(rows, width, -1)[:, -1])
    cache = out.cache.replace(length=jnp.full((rows,), width, jnp.int32))
    return jax.lax.scan(step, (first, cache), length=steps)[1].T


@pytest.mark.full
@pytest.mark.parametrize("name", [case_name(*case) for case in CASES])
def test_fixtures_are_what_this_transformers_computes(tmp_path, name):
    with torch.no_grad():
        theirs = load_theirs(write_checkpoint(tmp_path, name))(torch.tensor(prompts(), dtype=torch.long)).logits
    np.testing.assert_allclose(theirs, reference(f"{name}/logits"), rtol=0, atol=2e-5)


@pytest.mark.full
@BOTH
@FAMILIES
def test_eight_greedy_sequences_of_128_tokens_are_equal(tmp_path, name, numerics):
    params, config = load_policy(write_checkpoint(tmp_path, name))
    tokens = prompts(seed=11, sequences=8, length=10)
    ours = np.asarray(continue_greedily(params, config, jnp.asarray(tokens), 128, numerics))
    theirs = load_theirs(tmp_path).generate(
        torch.tensor(tokens, dtype=torch.long),
        attention_mask=torch.ones(tokens.shape, dtype=torch.long),
        generation_config=transformers.GenerationConfig(max_new_tokens=128, do_sample=False, pad_token_id=0),
    )
    assert theirs.shape == (8, 138)
    np.testing.assert_array_equal(ours, theirs[:, 10:].numpy())


@pytest.mark.full
@pytest.mark.parametrize("shard_bytes", [10**9, 40_000], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen2", "tiny-llama"])
def test_a_policy_that_we_saved_loads_in_transformers_with_the_same_logits(tmp_path, preset, dtype, shard_bytes):
    config = replace(PRESETS[preset], vocab_size=61, dtype=dtype)
    params = init_params(jax.random.key(4), config)
    tokenizer = small_tokenizer(family=config.family)
    save_policy(tmp_path / "p", params, config, tokenizer, {"temperature": 0.7, "do_sample": True}, shard_bytes)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "p", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == getattr(torch, dtype)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    assert model.generation_config.temperature == 0.7
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "p")
    assert tokenizer("ABx")["input_ids"] == [5, 6, 60]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    with torch.no_grad():
        theirs = model(torch.tensor(prompts(), dtype=torch.long)).logits.float().numpy()
    ours = np.asarray(all_logits(params, config, jnp.asarray(prompts()), PLAIN))
    tolerance = 1e-4 if dtype == "float32" else 0.03 * np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.full
@FAMILIES
def test_gradients_equal_those_of_torch(tmp_path, name):
    params, config = load_policy(write_checkpoint(tmp_path, name))
    tokens = prompts()

    def loss(params):
        log_probs = jax.nn.log_softmax(all_logits(params, config, jnp.asarray(tokens), INVARIANT)[:, :-1])
        return -jnp.take_along_axis(log_probs, jnp.asarray(tokens)[:, 1:, None], -1).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    model = load_theirs(tmp_path)
    long = torch.tensor(tokens, dtype=torch.long)
    scores = model(long).logits[:, :-1].reshape(-1, config.vocab_size)
    expected = torch.nn.functional.cross_entropy(scores, long[:, 1:].reshape(-1))
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-6)
    theirs = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    ours = policy_tensors(gradient, config)
    assert set(ours) == set(theirs)
    largest = max(np.abs(leaf).max() for leaf in theirs.values())
    for key, leaf in theirs.items():
        np.testing.assert_allclose(
            ours[key], leaf, rtol=0, atol=1e-5 * np.abs(leaf).max() + 1e-7 * largest, err_msg=key
        )
