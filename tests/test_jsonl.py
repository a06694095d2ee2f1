"""Datasets: layouts, bad rows, encoding and the order of an epoch."""

import gzip
import json
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import processors

from specrl_jax.data.jsonl import encode_examples, encode_supervised, epoch_rows, load_examples
from specrl_jax.data.layouts import Example, last_boxed, strip_calculator
from specrl_jax.data.tokenizers import arithmetic_tokenizer, train_bpe
from specrl_jax.errors import InputError

pytestmark = pytest.mark.ci
SAMPLES = pathlib.Path(__file__).parent / "fixtures" / "data"
FILES = {
    "gsm8k": ("gsm8k.jsonl", ["50", "1,250", "57"]),
    "math": ("math.jsonl", [r"\frac{5}{6}", r"\sqrt{13}"]),
    "aime": ("aime.jsonl", ["036", "64"]),
    "dapo": ("dapo.jsonl", ["1", "28", "17"]),
    "chat": ("chat.json", [None, None]),
    "generic": ("generic.jsonl", ["15", "14", None]),
}


def raw_rows(name):
    return [json.loads(line) for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def bpe():
    texts = [
        text for name in ("gsm8k.jsonl", "math.jsonl") for row in raw_rows(name) for text in map(str, row.values())
    ]
    return train_bpe(texts, 400)


@pytest.mark.parametrize("layout", FILES)
def test_layout_is_told_from_the_fields(layout):
    name, answers = FILES[layout]
    loaded = load_examples(SAMPLES / name)
    assert loaded.layout == layout
    assert [example.answer for example in loaded.examples] == answers
    assert load_examples(str(SAMPLES / name), layout) == loaded


def test_fields_of_each_layout():
    gsm8k = load_examples(SAMPLES / "gsm8k.jsonl").examples[0]
    assert gsm8k.fields == raw_rows("gsm8k.jsonl")[0]
    assert (gsm8k.prompt, gsm8k.solution) == (gsm8k.fields["question"], gsm8k.fields["answer"])
    math = load_examples(SAMPLES / "math.jsonl").examples[0]
    assert (math.prompt, math.solution) == (math.fields["problem"], math.fields["solution"])
    first, second = load_examples(SAMPLES / "chat.json").examples
    assert (first.prompt, first.solution) == (first.fields["instruction"], first.fields["response"])
    assert second.prompt == "Name the mood of this line.\n\nThe garden was quiet — nobody had come back."
    generic = load_examples(SAMPLES / "generic.jsonl").examples[1]
    assert generic.prompt == generic.fields["prompt"]
    assert (generic.solution, generic.fields["difficulty"]) == ("20 - 6 = 14", "easy")


def test_dapo_keeps_the_first_of_each_prompt_and_its_row_id():
    loaded = load_examples(SAMPLES / "dapo.jsonl")
    assert loaded.duplicates == 3
    assert [example.row_id for example in loaded.examples] == [0, 1, 4]
    assert [example.fields["extra_info"]["index"] for example in loaded.examples] == ["a0", "b0", "c0"]


def test_other_layouts_keep_repeated_prompts(tmp_path):
    file = tmp_path / "twice.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n\n{"prompt": "a", "answer": "2"}\n')
    loaded = load_examples(file)
    assert ([e.row_id for e in loaded.examples], loaded.duplicates) == ([0, 1], 0)


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "json", "folder"])
def test_other_files_hold_the_same_rows(kind, tmp_path, monkeypatch):
    source = tmp_path / f"dapo.{kind}"
    if kind == "jsonl.gz":
        source.write_bytes(gzip.compress((SAMPLES / "dapo.jsonl").read_bytes()))
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(raw_rows("dapo.jsonl")), source)
    elif kind == "json":
        source.write_text(json.dumps(raw_rows("dapo.jsonl"), indent=1))
    else:
        # The datasets library reads a folder as it reads a dataset of the hub.
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        source.mkdir()
        (source / "train.jsonl").write_bytes((SAMPLES / "dapo.jsonl").read_bytes())
    assert load_examples(source) == load_examples(SAMPLES / "dapo.jsonl")


def test_calculator_annotations_are_stripped_on_request():
    assert strip_calculator("48/2 = <<48/2=24>>24 and 3 << 4") == "48/2 = 24 and 3 << 4"
    kept, stripped = (load_examples(SAMPLES / "gsm8k.jsonl", calculator=c).examples for c in (True, False))
    assert "<<1000/4=250>>" in kept[1].solution
    assert stripped[1].solution.startswith("The lock costs 1000/4=$250.\n")
    assert [e.answer for e in kept] == [e.answer for e in stripped]


def test_last_boxed_balances_braces():
    assert last_boxed(r"$\boxed{1}$ then $\boxed{\frac{a}{b}}$.") == r"\frac{a}{b}"
    assert last_boxed(r"\boxed{7} and \boxed{\frac{1") == "7"
    assert last_boxed("7") is None


BAD_ROWS = {
    "truncated line": ('{"prompt": "a"}\n{"prompt": "b', "line 2: this is not valid JSON"),
    "blank lines count": ('{"prompt": "a"}\n\n\n{"prompt"}\n', "line 4: this is not valid JSON"),
    "no object": ('{"prompt": "a"}\n3\n', "line 2: this is not a JSON object"),
    "missing field": ('{"prompt": "a"}\n{"answer": "b"}\n', "line 2: field 'prompt' is missing"),
    "empty prompt": ('{"prompt": "a"}\n{"prompt": " "}\n', "line 2: field 'prompt' is empty"),
    "prompt of another type": ('{"prompt": {"a": 1}}\n', "line 1: field 'prompt' is not text"),
    "answer of another type": ('{"prompt": "a", "answer": [1]}\n', "line 1: field 'answer' is not text"),
    "unknown fields": ('{"text": "a", "id": 1}\n', "line 1: the fields id, text fit no known layout"),
    "no GSM8K answer": (
        '{"question": "a", "answer": "b #### 1"}\n{"question": "a", "answer": "b"}\n',
        "line 2: field 'answer' does not end with",
    ),
    "no boxed answer": ('{"problem": "a", "solution": "b"}\n', "line 1: there is neither a field 'answer' nor"),
    "no ground truth": (
        '{"prompt": [{"role": "user", "content": "a"}], "reward_model": {}}\n',
        "line 1: field 'ground_truth' is missing",
    ),
    "no messages": ('{"prompt": "a", "reward_model": {}}\n', "line 1: field 'prompt' is not a list of messages"),
    "no content": ('{"prompt": [{"role": "user"}]}\n', "line 1: field 'content' is missing"),
    "broken array": ('\n[{"prompt": "a"},\n{"prompt": }]\n', "line 3: this is not valid JSON"),
    "array of numbers": ('[{"prompt": "a"}, 3]\n', "item 2: this is not a JSON object"),
    "nested too deeply": ("[" * 100_000, "line 1: this is nested too deeply"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_named_by_file_and_line(case, tmp_path):
    text, message = BAD_ROWS[case]
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        load_examples(file)
    assert str(error.value).startswith(f"{file}, {message}")
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named_by_line(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match=r"line 2: this is not UTF-8 text; save the file as UTF-8"):
        load_examples(file)


def test_truncated_files_are_refused(tmp_path):
    for name, content in (("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99)[:-9]), ("a.parquet", b"PAR1")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{name} cannot be read .*; copy it again"):
            load_examples(tmp_path / name)


def test_sources_that_hold_nothing_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "data.csv").write_text("prompt\na\n")
    for source, message in {
        tmp_path / "empty.jsonl": "holds no rows",
        tmp_path / "data.csv": "is of no known kind",
        tmp_path / "nothing.jsonl": "does not exist",
        "nobody/nothing": r"dataset 'nobody/nothing' \(subset None, split train\) cannot be loaded",
    }.items():
        with pytest.raises(InputError, match=message) as error:
            load_examples(source)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="layout 'gsm' is unknown; choose one of gsm8k"):
        load_examples(SAMPLES / "gsm8k.jsonl", "gsm")


def test_prompts_follow_the_chat_template(bpe):
    examples = load_examples(SAMPLES / "generic.jsonl").examples
    encoded = encode_examples(examples, bpe, 64)
    assert (encoded.dropped, encoded.examples) == (0, examples)
    tokens, lengths = np.asarray(encoded.prompts.tokens), np.asarray(encoded.prompts.lengths)
    assert tokens.shape == (3, lengths.max())
    texts = [bpe.decode(row[:n]) for row, n in zip(tokens, lengths, strict=True)]
    assert texts[0] == "<|user|>What is 7 + 8?<|assistant|>"
    assert texts[1] == "<|system|>Answer with one number.<|user|>What is 20 - 6?<|assistant|>"
    for row, n, example in zip(tokens, lengths, examples, strict=True):
        messages = example.prompt if isinstance(example.prompt, list) else [{"role": "user", "content": example.prompt}]
        theirs = bpe.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert row.tolist() == theirs + [0] * (len(row) - n)
    assert encoded.prompts.row_ids.dtype == np.uint32


def test_long_prompts_are_dropped_and_counted():
    examples = [Example(5, "1+2="), Example(6, "1+2+3="), Example(9, "7+7=")]
    encoded = encode_examples(examples, arithmetic_tokenizer(), 4)
    assert (encoded.dropped, encoded.examples) == (1, [examples[0], examples[2]])
    assert np.asarray(encoded.prompts.row_ids).tolist() == [5, 9]
    assert np.asarray(encoded.prompts.tokens).shape == (2, 4)
    with pytest.raises(InputError, match=r"none of the 3 prompts .* 3 tokens \(the shortest has 4\); raise"):
        encode_examples(examples, arithmetic_tokenizer(), 3)


def test_a_tokenizer_without_template_gets_the_bare_text():
    tokenizer = train_bpe(["1+2="], 261)
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", 2)]
    )
    encoded = encode_examples([Example(0, "1+2=")], tokenizer, 9)
    assert tokenizer.decode(np.asarray(encoded.prompts.tokens)[0]) == "<|system|>1+2="
    supervised = encode_supervised([Example(0, "1+2=", solution="3")], tokenizer, 9)
    assert tokenizer.decode(supervised.tokens[0]) == "<|system|>1+2=3<end>"


def test_a_template_that_refuses_a_prompt_names_the_row():
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system message here') }}"
    with pytest.raises(InputError, match=r"row 7: the chat template refuses the prompt \(no system message here\)"):
        encode_examples([Example(7, "1+2=")], tokenizer, 9)


def test_supervised_texts_end_with_the_end_token(bpe):
    examples = load_examples(SAMPLES / "gsm8k.jsonl").examples
    texts = encode_supervised(examples, bpe, 512)
    assert texts.dropped == 0
    assert texts.tokens.shape == (3, texts.lengths.max())
    for row, n, p, example in zip(texts.tokens, texts.lengths, texts.prompt_lengths, examples, strict=True):
        assert bpe.decode(row[:p]) == f"<|user|>{example.prompt}<|assistant|>"
        assert bpe.decode(row[p:n]) == example.solution + "<end>"
        assert not row[n:].any()
    shorter = encode_supervised(examples, bpe, int(sorted(texts.lengths)[1]))
    assert shorter.dropped == 1
    assert sorted(shorter.lengths) == sorted(texts.lengths)[:2]


def test_supervised_texts_fall_back_on_the_answer_and_need_one():
    tokenizer = arithmetic_tokenizer()
    texts = encode_supervised([Example(0, "1+2=", "3")], tokenizer, 6)
    assert tokenizer.decode(texts.tokens[0]) == "1+2=3<end>"
    with pytest.raises(InputError, match="row 4 has neither a solution nor an answer"):
        encode_supervised([Example(4, "1+2=")], tokenizer, 6)
    with pytest.raises(InputError, match=r"at most 5 tokens \(the shortest has 6\); raise max_tokens"):
        encode_supervised([Example(0, "1+2=", "3")], tokenizer, 5)


def test_an_epoch_shows_every_row_once():
    steps = [epoch_rows(3, step, 4, 12) for step in range(6)]
    first, second = np.concatenate(steps[:3]), np.concatenate(steps[3:])
    assert sorted(first) == sorted(second) == list(range(12))
    assert first.tolist() != second.tolist() != sorted(second)
    assert epoch_rows(3, 4, 4, 12).tolist() == steps[4].tolist()
    assert epoch_rows(4, 4, 4, 12).tolist() != steps[4].tolist()


def test_a_step_never_repeats_a_row_and_the_remainder_changes():
    steps = [epoch_rows(0, step, 4, 10) for step in range(40)]
    assert all(len(set(rows.tolist())) == 4 for rows in steps)
    left_out = {frozenset(range(10)) - set(np.concatenate(steps[i : i + 2]).tolist()) for i in range(0, 40, 2)}
    assert len(left_out) > 5
    with pytest.raises(InputError, match="a step of 11 prompts cannot be drawn from 10 examples"):
        epoch_rows(0, 0, 11, 10)


def test_heavy_libraries_are_imported_only_when_used():
    code = (
        "import sys, specrl_jax.data.jsonl, specrl_jax.rl.rewards; print({'datasets', 'math_verify'} & {*sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
