"""A small policy drafts for a larger one: logits of its own forward, exact in a rollout, refused where it must be."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_block import forced
from test_suffix import engine_of, plain, rolled_out
from tiny import PLAIN, POLICY, VOCAB, assert_same, no_texts, random_eagle3, tiny_params

from specrl_jax.data.tokenizers import arithmetic_tokenizer
from specrl_jax.drafters import small_policy
from specrl_jax.drafters.combined import Both, CombinedDrafter
from specrl_jax.drafters.heads import as_head, for_policy, load_drafter, save_drafter
from specrl_jax.drafters.protocol import ChainDrafter
from specrl_jax.drafters.small_policy import SmallPolicyDrafter
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import save_policy
from specrl_jax.models.policy import forward, grid_batch, logits, sequence_positions
from specrl_jax.models.tree import Tree
from specrl_jax.rollout.rules import Match

pytestmark = pytest.mark.ci
SMALL = PolicyConfig("qwen2", VOCAB + 4, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
DRAFTER = SmallPolicyDrafter(SMALL, VOCAB)
EMBED = jnp.zeros((VOCAB, 1))
COUNTS = jnp.array([2, 9, 0, 5], jnp.int32)


@pytest.fixture(scope="module")
def texts():
    return jnp.asarray(np.random.RandomState(0).randint(0, VOCAB, (4, 16)), jnp.int32)


def whole_text(tokens):
    """The law after every token, from one forward of the policy over all of them."""
    batch = grid_batch(tokens, sequence_positions(jnp.full((len(tokens),), tokens.shape[1]), tokens.shape[1]))
    out = forward(tiny_params(SMALL), SMALL, batch, numerics=PLAIN)
    scores = logits(tiny_params(SMALL), SMALL, out.hidden, PLAIN)
    return scores.reshape(*tokens.shape, -1)[..., :VOCAB]


def committed(tokens, counts, *later):
    """The state after `counts` pairs, and more of them in later calls."""
    params, state = tiny_params(SMALL), DRAFTER.init_state(len(tokens), tokens.shape[1])
    state = DRAFTER.read_first(params, EMBED, state, tokens[:, 0])
    for count in (counts, *later):
        at = state.length[:, None] + 1 + jnp.arange(10)[None]
        pairs = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), axis=1)
        state = DRAFTER.commit(params, EMBED, state, pairs, jnp.zeros((*pairs.shape, 0)), count)
    return state


@pytest.mark.parametrize("chunk", [64, 4])
def test_drafts_have_the_logits_of_the_whole_text(monkeypatch, texts, chunk):
    """After pairs that came in one or two calls, chunked or not: of a chain at once and one draft after the other."""
    monkeypatch.setattr(small_policy, "_CHUNK", chunk)
    expected = whole_text(texts)
    params, drafts = tiny_params(SMALL), 4
    for state in (committed(texts, COUNTS), committed(texts, COUNTS // 2, COUNTS - COUNTS // 2)):
        np.testing.assert_array_equal(state.length, COUNTS)
        at = COUNTS[:, None] + jnp.arange(drafts)[None]
        following = jnp.take_along_axis(texts, at + 1, axis=1)
        chain, stepwise = [], []
        DRAFTER.propose(params, EMBED, state, no_texts(4), Tree.chain(drafts), forced(following, chain))
        choose = forced(following, stepwise)
        carry, _ = DRAFTER.begin(params, EMBED, state, no_texts(4), drafts, choose)
        for step in range(drafts - 1):
            carry, _ = DRAFTER.advance(params, EMBED, state, carry, following[:, step], jnp.int32(step), choose)
        for ours in (chain, stepwise):
            theirs = jnp.take_along_axis(expected, at[..., None], axis=1)
            np.testing.assert_allclose(jnp.stack(ours, axis=1), theirs, atol=1e-5)


def test_after_a_gap_the_text_before_is_forgotten(texts):
    """As if the text began after the gap: rotary positions are relative."""
    none = jnp.zeros_like(COUNTS)
    state = DRAFTER.skip(committed(texts, COUNTS), jnp.array([3, 0, 4, 1], jnp.int32))
    gone = state.length
    np.testing.assert_array_equal(gone, COUNTS + jnp.array([3, 0, 4, 1]))
    read = jnp.full_like(none, 3)
    pairs = jnp.take_along_axis(texts, gone[:, None] + 1 + jnp.arange(3)[None], axis=1)
    state = DRAFTER.commit(tiny_params(SMALL), EMBED, state, pairs, jnp.zeros((4, 3, 0)), read)
    ours = DRAFTER._logits(tiny_params(SMALL), state.hidden[:, None])[:, 0]
    np.testing.assert_allclose(ours[jnp.array([0, 2, 3])], whole_text(pairs)[jnp.array([0, 2, 3]), -1], atol=1e-5)
    np.testing.assert_allclose(ours[1], whole_text(texts)[1, 12], atol=1e-5)


@pytest.mark.parametrize("case", ["tree", "few rows", "adaptive", "with suffix drafts"])
def test_the_policy_s_tokens_whatever_is_drafted(case):
    drafter, params, settings = DRAFTER, tiny_params(SMALL), {}
    assert isinstance(drafter, ChainDrafter)
    if case == "tree":
        settings = {"rule": Match(branches=2)}
    if case == "few rows":
        settings = {"rows": 2}
    if case == "adaptive":
        settings = {"adaptive": True, "rows": 4}
    if case == "with suffix drafts":
        drafter, params = CombinedDrafter(drafter), Both(params, None)
    assert_same(rolled_out(engine_of(3, drafter, **settings), params), plain())


def test_a_policy_that_drafts_for_itself_is_always_right():
    """In trees, which hold a chain; the first token of a prompt is known too, also where it is the only one."""
    drafter = SmallPolicyDrafter(POLICY, VOCAB)
    stats = rolled_out(engine_of(3, drafter, Match(2, "full")), tiny_params()).stats
    assert stats.rounds > 0
    assert stats.accepted == 3 * stats.rounds


TOKENIZER = arithmetic_tokenizer()
LARGE = replace(POLICY, vocab_size=len(TOKENIZER))
PADDED = replace(SMALL, family="qwen3", vocab_size=len(TOKENIZER) + 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small policy whose vocabulary is padded."""
    folder = tmp_path_factory.mktemp("models") / "small"
    save_policy(folder, tiny_params(PADDED), PADDED, TOKENIZER)
    return folder


def test_a_folder_of_a_policy_is_a_small_policy(folder):
    """Its kind is told from config.json; of a padded vocabulary only what the tokenizer has is proposed."""
    params = tiny_params(LARGE)
    drafter, draft = for_policy(*load_drafter(folder, LARGE, TOKENIZER), params)
    assert drafter == SmallPolicyDrafter(PADDED, len(TOKENIZER))
    jax.tree.map(np.testing.assert_array_equal, draft, tiny_params(PADDED))
    seen = []
    drafter.begin(draft, EMBED, drafter.init_state(1, 8), no_texts(1), 2, forced(jnp.zeros((1, 1), jnp.int32), seen))
    assert seen[0].shape == (1, len(TOKENIZER))
    # Without a policy to fit, as a folder is checked, all of its ids are its own.
    assert load_drafter(folder)[0].shared_vocab == PADDED.vocab_size


def with_another_token():
    """The tokenizer with an x in place of the +."""
    core = TOKENIZER.backend_tokenizer.to_str().replace('"+"', '"x"')
    return type(TOKENIZER)(tokenizer_object=type(TOKENIZER.backend_tokenizer).from_str(core), eos_token="<end>")


def test_a_head_that_comes_with_another_tokenizer_is_refused(tmp_path):
    drafter, params = random_eagle3()
    save_drafter(tmp_path / "head", drafter, params)
    assert load_drafter(tmp_path / "head", tokenizer=TOKENIZER)[0] == drafter
    TOKENIZER.save_pretrained(tmp_path / "head")
    assert load_drafter(tmp_path / "head", tokenizer=TOKENIZER)[0] == drafter
    with pytest.raises(InputError, match=r"draft head .*head cannot draft: its tokenizer has '\+' for id 13, and the "):
        load_drafter(tmp_path / "head", tokenizer=with_another_token())


def test_small_policies_that_cannot_draft_are_refused(folder, tmp_path):
    other = arithmetic_tokenizer()
    other.add_tokens(["x"])
    # Ids that only one of them has are no harm.
    assert load_drafter(folder, LARGE, other)[0].shared_vocab == len(TOKENIZER)
    other = with_another_token()
    with pytest.raises(
        InputError, match=r"small cannot draft: its tokenizer has '\+' for id 13, and the policy's 'x'; "
    ):
        load_drafter(folder, LARGE, other)
    with pytest.raises(InputError, match="small has vocab_size 32, the policy 22, and no tokenizers tell which ids"):
        load_drafter(folder, LARGE)
    with pytest.raises(InputError, match="is a small policy, which drafts as it is; give a draft head to train"):
        as_head(DRAFTER)
    assert as_head(random_eagle3()[0]) == random_eagle3()[0]
