"""The arithmetic task against Python's own arithmetic and the tokenizers' own decoding."""

import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specrl_jax.data.arithmetic import (
    ArithmeticConfig,
    Problems,
    encode_prompts,
    encode_solutions,
    problem_text,
    reward,
    sample_problems,
    split_index,
)
from specrl_jax.data.symbols import SYMBOLS, detokenise, symbol_table, token_bytes
from specrl_jax.errors import InputError

pytestmark = pytest.mark.ci

CONFIG = ArithmeticConfig()
SHORT = ArithmeticConfig(min_terms=2, term_weights=(1.0, 1.0))
TINY = ArithmeticConfig(min_terms=2, term_weights=(1.0,), digit_weights=(1.0,))
SPLITS = ("train", "dev", "test")
SPECIALS = {"pad_token": "<pad>", "eos_token": "<eos>"}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sample(config, split, seed, counters) -> Problems:
    return sample_problems(config, split, seed, counters)


_encode_prompts, _encode_solutions = jax.jit(encode_prompts), jax.jit(encode_solutions)
_reward, _split_index = jax.jit(reward), jax.jit(split_index)


@functools.cache
def _problems(n: int = 512, split: str = "train", seed: int = 3) -> Problems:
    return _sample(CONFIG, split, seed, jnp.arange(n, dtype=jnp.uint32))


@functools.cache
def _texts() -> list[tuple[str, str]]:
    """Prompts and responses as text."""
    table, tokenizer = _table("characters"), _tokenizer("characters")
    prompts, prompt_lengths = _encode_prompts(table, _problems())
    solutions, lengths = _encode_solutions(table, _problems())
    decode = lambda tokens, length: tokenizer.decode(np.asarray(tokens)[:length])  # noqa: E731
    return [
        (decode(*pair[:2]), decode(*pair[2:])) for pair in zip(prompts, prompt_lengths, solutions, lengths, strict=True)
    ]


def _characters() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *SYMBOLS, " "))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, **SPECIALS)


def _corpus() -> list[str]:
    rng = random.Random(0)
    return [f"{rng.randrange(300)}={rng.randrange(300)}-{rng.randrange(99)}+ é" for _ in range(300)]


def _byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE without word boundaries: its tokens hold several characters, `=1` among them."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        _corpus(),
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=["<pad>", "<eos>"], show_progress=False
        ),
    )
    core.add_tokens([AddedToken("12 =", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, **SPECIALS)


def _sentencepiece() -> PreTrainedTokenizerFast:
    """BPE in the manner of SentencePiece: `▁` for spaces, byte tokens for what it does not know."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *fallback, *SYMBOLS, "▁", "12", "=1", "▁1"))}
    merges = [("1", "2"), ("=", "1"), ("▁", "1")]
    core = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, **SPECIALS)


@functools.cache
def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    return {"characters": _characters, "bytes": _byte_level, "sentencepiece": _sentencepiece}[kind]()


@functools.cache
def _table(kind: str):
    return symbol_table(_tokenizer(kind))


def _rows(responses: list[list[int]], width: int):
    tokens = np.zeros((len(responses), width), np.int32)
    for row, response in zip(tokens, responses, strict=True):
        row[: len(response)] = response
    return jnp.asarray(tokens), jnp.asarray([len(r) for r in responses], jnp.int32)


def test_workings_are_pythons():
    values = np.asarray(_problems().values)
    for (prompt, response), value in zip(_texts(), values, strict=True):
        expression, lines = prompt.removesuffix("="), []
        assert expression + "=" == prompt
        assert eval(expression) == value >= 0
        while match := re.fullmatch(r"(\d+[+-]\d+)(.*)", expression):
            expression = str(eval(match[1])) + match[2]
            lines.append(expression)
        assert response == "=".join(lines) + "<eos>"
    assert [problem_text(_problems(), i) for i in range(8)] == [prompt for prompt, _ in _texts()[:8]]


def test_laws_of_terms():
    problems = _problems(16384)
    terms = np.asarray(problems.terms)
    counts = np.bincount(np.asarray(problems.num_terms), minlength=12)[3:] / len(terms)
    np.testing.assert_allclose(counts, np.array(CONFIG.term_weights) / sum(CONFIG.term_weights), atol=0.012)
    np.testing.assert_array_equal((terms != 0).sum(1), problems.num_terms)
    # Digits of the first terms; the size of a later term bears on its sign only.
    sizes = np.abs(terms[terms != 0])
    digits = np.bincount(np.floor(np.log10(sizes)).astype(int)) / len(sizes)
    np.testing.assert_allclose(digits, CONFIG.digit_weights, atol=0.006)
    two = np.bincount(sizes[(sizes > 9) & (sizes < 100)])[10:]
    assert len(two) == 90
    # Chi-square of 89 degrees of freedom: mean 89, standard deviation 13.3.
    assert ((two - two.mean()) ** 2 / two.mean()).sum() < 160
    # A subtraction is drawn half the time where it is possible, whatever the size of the term.
    before, later = np.cumsum(terms, axis=1)[:, :-1], terms[:, 1:]
    for low, high in ((1, 10), (10, 100), (100, 1000)):
        possible = (np.abs(later) >= low) & (np.abs(later) < high) & (np.abs(later) <= before)
        assert possible.sum() > 1000
        np.testing.assert_allclose((later < 0)[possible].mean(), 0.5, atol=0.03)


def test_lengths_have_a_long_tail():
    _, lengths = _encode_solutions(_table("characters"), _problems(16384))
    characters = np.asarray(lengths) - 1
    median, tail = np.median(characters), np.percentile(characters, 99)
    assert median >= 45
    assert tail >= 3.6 * median
    assert 195 <= characters.max() < CONFIG.solution_width <= 231


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_widths_are_reached_by_the_largest_problem(digits):
    config = ArithmeticConfig(min_terms=2, term_weights=(1.0,) * 10, digit_weights=(1.0,) * digits)
    terms = jnp.full((1, config.max_terms), 10**digits - 1, jnp.int32)
    problems = Problems(terms, jnp.full((1,), config.max_terms, jnp.int32), config)
    _, prompt_length = _encode_prompts(_table("characters"), problems)
    tokens, length = _encode_solutions(_table("characters"), problems)
    assert int(prompt_length[0]) == config.prompt_width
    assert int(length[0]) == config.solution_width == tokens.shape[1]
    assert int(problems.values[0]) == config.max_value


def test_splits_are_disjoint_and_exhaustive():
    """Few enough problems to draw them all: every one lies in exactly one split, for any seed."""
    found = {split: set() for split in SPLITS}
    for seed in range(2):
        for split in SPLITS:
            problems = _sample(TINY, split, seed, jnp.arange(2048, dtype=jnp.uint32))
            found[split] |= {tuple(row) for row in np.asarray(problems.terms).tolist()}
    every = {(a, b) for a in range(1, 10) for b in range(-a, 10) if b}
    assert sum(len(problems) for problems in found.values()) == len(every) == 126
    assert set.union(*found.values()) == every


def test_split_sizes_and_membership():
    rng = np.random.default_rng(0)
    terms = jnp.asarray(rng.integers(1, 1000, (40_000, 4)), jnp.int32)
    shares = np.bincount(np.asarray(_split_index(terms))) / len(terms)
    np.testing.assert_allclose(shares, [6 / 8, 1 / 8, 1 / 8], atol=0.007)
    # Room for more terms does not change the split.
    padded = jnp.pad(terms, ((0, 0), (0, 3)))
    np.testing.assert_array_equal(_split_index(terms), _split_index(padded))
    for index, split in enumerate(SPLITS):
        assert set(np.asarray(_split_index(_problems(512, split).terms)).tolist()) == {index}


def test_split_hash_is_fixed():
    """Changing the hash would move test problems into training: published splits stay."""
    terms = jnp.asarray([[18, 29, 99], [5, -3, 0], [120, 7, -99], [1, 1, 1], [64, 2, 0], [9, 9, 9]], jnp.int32)
    assert _split_index(terms).tolist() == [1, 0, 1, 1, 2, 0]


def test_problem_depends_on_seed_split_and_counter_only():
    split, everything = "dev", _problems(512, "dev")
    for counters in ([7], [300, 7, 511, 7]):
        some = _sample(CONFIG, split, 3, jnp.asarray(counters, jnp.uint32))
        np.testing.assert_array_equal(some.terms, everything.terms[jnp.asarray(counters)])
        np.testing.assert_array_equal(some.num_terms, everything.num_terms[jnp.asarray(counters)])
    by_vmap = jax.vmap(lambda c: sample_problems(CONFIG, split, jnp.uint32(3), c[None]))(
        jnp.arange(16, dtype=jnp.uint32)
    )
    np.testing.assert_array_equal(by_vmap.terms[:, 0], everything.terms[:16])
    other_seed = _sample(CONFIG, split, 4, jnp.arange(512, dtype=jnp.uint32))
    assert np.mean(np.all(np.asarray(other_seed.terms == everything.terms), axis=1)) < 0.01


def test_large_counters_and_distinct_problems():
    counters = jnp.asarray([2**32 - 1, 2**31, 0], jnp.uint32)
    assert len({tuple(row) for row in np.asarray(_sample(CONFIG, "dev", 0, counters).terms).tolist()}) == 3
    rows = {tuple(row) for row in np.asarray(_problems(16384).terms).tolist()}
    assert len(rows) > 16384 * 0.99


def _shift_last_digit(text: str) -> str:
    return text[:-1] + str((int(text[-1]) + 1) % 10)


def _responses() -> tuple[list[int], list[str], list[bool]]:
    """Problems, texts and whether they end: right ones, damaged ones and cut ones."""
    rng = random.Random(1)
    indices, texts, ended = [], [], []
    edits = [
        lambda t, a: t,
        lambda t, a: a,
        lambda t, a: "=" + a,
        lambda t, a: "9=+-=" + a,
        lambda t, a: t.replace("=", "==") + "=" + a,
        lambda t, a: t + "=",
        lambda t, a: t[: len(t) - len(a)] + "0" + a,
        lambda t, a: t[: len(t) - len(a)] + "+" + a,
        lambda t, a: t[: len(t) - len(a)] + "-" + a,
        lambda t, a: t[: len(t) - len(a)] + " " + a,
        lambda t, a: t + " ",
        lambda t, a: t + rng.choice(SYMBOLS),
        lambda t, a: t[:-1],
        lambda t, a: _shift_last_digit(t),
        lambda t, a: t[: rng.randrange(len(t))],
        lambda t, a: "".join(rng.sample(t, len(t))),
        lambda t, a: t + "é=" + a,
        lambda t, a: "",
    ]
    for index, (prompt, response) in enumerate(_texts()[:160]):
        answer = str(eval(prompt.removesuffix("=")))
        for edit in rng.sample(edits, 4) + edits[:1]:
            indices.append(index)
            texts.append(edit(response.removesuffix("<eos>"), answer))
            ended.append(rng.random() < 0.8)
    return indices, texts, ended


@pytest.mark.parametrize("kind", ["characters", "bytes", "sentencepiece"])
def test_reward_is_pythons_whatever_the_tokens(kind):
    tokenizer, table = _tokenizer(kind), _table(kind)
    indices, texts, ended = _responses()
    rows = [i for i, text in enumerate(texts) if kind != "characters" or "é" not in text]
    indices, texts, ended = ([column[i] for i in rows] for column in (indices, texts, ended))
    encoded = [tokenizer.encode(text) for text in texts]
    if kind != "characters":
        assert sum(map(len, encoded)) < 0.98 * sum(map(len, texts))
    tokens, lengths = _rows([e + [tokenizer.eos_token_id] * end for e, end in zip(encoded, ended, strict=True)], 300)
    # Whatever lies beyond the length does not count.
    beyond = jnp.arange(300)[None] - lengths[:, None]
    tokens = jnp.where(beyond == 0, tokenizer.eos_token_id, jnp.where(beyond > 0, table.token_ids[7], tokens))
    problems = jax.tree.map(lambda x: x[jnp.asarray(indices)], _problems())
    expected = [
        float(end and text.rsplit("=", 1)[-1] == str(eval(_texts()[i][0].removesuffix("="))))
        for i, text, end in zip(indices, texts, ended, strict=True)
    ]
    assert 0.2 < np.mean(expected) < 0.6
    np.testing.assert_array_equal(_reward(table, problems, tokens, lengths), expected)


@pytest.mark.parametrize("kind", ["characters", "bytes", "sentencepiece"])
def test_reference_solutions_are_rewarded(kind):
    problems = _problems()
    tokens, lengths = _encode_solutions(_table(kind), problems)
    assert np.asarray(_reward(_table(kind), problems, tokens, lengths)).all()
    assert not np.asarray(_reward(_table(kind), problems, tokens, lengths - 1)).any()
    assert not np.asarray(_reward(_table(kind), problems, tokens, jnp.zeros_like(lengths))).any()
    wrong = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), problems)
    same = np.asarray(problems.values == wrong.values).astype(np.float32)
    np.testing.assert_array_equal(_reward(_table(kind), wrong, tokens, lengths), same)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_bytes_are_the_tokenizers_own(kind):
    """Any cut into tokens spells what the tokenizer itself decodes, special tokens left out."""
    tokenizer, table = _tokenizer(kind), _table(kind)
    texts = ["12=1 12 = é=12", "=1=1=12", "naïve 世界 \n+7", "", " 1", "12 =12 ="]
    rows = [tokenizer.encode(text) for text in texts]
    assert [b"".join(token_bytes(tokenizer)[i] for i in row).decode() for row in rows] == texts
    rng = np.random.default_rng(0)
    if kind == "bytes":
        rows += [rng.integers(0, len(tokenizer), 12).tolist() for _ in range(8)]
    tokens, lengths = _rows([*rows, [len(tokenizer) + 5, *rows[0]]], 40)
    text, sizes = jax.jit(detokenise)(table, tokens, lengths)
    decoded = [bytes(row[:size]).decode(errors="replace") for row, size in zip(np.asarray(text), sizes, strict=True)]
    assert decoded[:-1] == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert decoded[-1] == texts[0]
    assert not np.asarray(table.byte_lengths)[[tokenizer.pad_token_id, tokenizer.eos_token_id]].any()


def test_tokenizers_that_cannot_write_problems_are_refused():
    without = Tokenizer(models.WordLevel({"<eos>": 0, **{c: i + 1 for i, c in enumerate("0123456789+=")}}))
    with pytest.raises(InputError, match="no single token for '-'"):
        symbol_table(PreTrainedTokenizerFast(tokenizer_object=without, eos_token="<eos>"))
    endless = Tokenizer(models.WordLevel({c: i for i, c in enumerate(SYMBOLS)}))
    with pytest.raises(InputError, match="no end token"):
        symbol_table(PreTrainedTokenizerFast(tokenizer_object=endless))
    with pytest.raises(InputError, match="no fast tokenizer"):
        symbol_table(object())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_terms": 1}, "min_terms is 1"),
        ({"term_weights": ()}, "term_weights"),
        ({"term_weights": (1.0, float("nan"))}, "term_weights"),
        ({"digit_weights": (1.0, -1.0)}, "digit_weights"),
        ({"digit_weights": (1.0, 0.0)}, "digit_weights"),
        ({"digit_weights": (1.0,) * 9}, "32-bit"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        ArithmeticConfig(**changes)


def _step(table, counters):
    problems = sample_problems(SHORT, "train", 5, counters)
    prompts, solutions = encode_prompts(table, problems), encode_solutions(table, problems)
    return prompts, solutions, reward(table, problems, *solutions)


def test_sharded_is_unsharded():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    spec = PartitionSpec("data")
    table, counters = _table("characters"), jnp.arange(64, dtype=jnp.uint32)
    whole = jax.jit(_step)(table, counters)
    by_shard = jax.shard_map(_step, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)
    jax.tree.map(np.testing.assert_array_equal, whole, jax.jit(by_shard)(table, counters))
    placed = jax.device_put(counters, NamedSharding(mesh, spec))
    table = jax.device_put(table, NamedSharding(mesh, PartitionSpec()))
    jax.tree.map(np.testing.assert_array_equal, whole, jax.jit(_step)(table, placed))


def test_lowers_for_every_backend():
    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(jax.jit(_step), platforms=platforms)(
        _table("characters"), jnp.arange(64, dtype=jnp.uint32)
    )
    assert exported.platforms == platforms
