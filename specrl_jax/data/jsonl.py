"""Examples from local files or the Hugging Face hub, and their encoding as prompts or supervised texts."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerFast

from specrl_jax.data.layouts import (
    LAYOUTS,
    REPEATING_LAYOUTS,
    Example,
    Messages,
    read_row,
    strip_calculator,
    tell_layout,
)
from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError

_FILE_KINDS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
Rows = Iterator[tuple[Any, str]]


@dataclass(frozen=True)
class LoadedExamples:
    """The examples of one source, in its order.

    layout: how its rows were read.
    duplicates: rows left out because an earlier row has the same prompt (layouts that repeat their prompts only).
    """

    examples: list[Example]
    layout: str
    duplicates: int


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts ready for the rollout, and what they came from.

    prompts: all of them, `[n, p]`, where p is the length of the longest.
    examples: the example of each prompt, in the same order.
    dropped: examples left out because their prompt was too long.
    """

    prompts: Prompts
    examples: list[Example]
    dropped: int


@dataclass(frozen=True)
class SupervisedTexts:
    """Prompts with their solutions and the end token.

    tokens: right-padded with 0, `[n, t]`, where t is the length of the longest.
    lengths: tokens of each text, `[n]`.
    prompt_lengths: tokens of its prompt, which carry no loss, `[n]`.
    dropped: examples left out because they were too long.
    """

    tokens: Int[np.ndarray, "n t"]
    lengths: Int[np.ndarray, "n"]
    prompt_lengths: Int[np.ndarray, "n"]
    dropped: int


def load_examples(
    source: str | Path,
    layout: str | None = None,
    *,
    split: str = "train",
    subset: str | None = None,
    calculator: bool = True,
) -> LoadedExamples:
    """Read a dataset.

    Args:
        source: a .jsonl, .json or .parquet file (the first two also gzipped), a folder, or a name on the hub.
        layout: one of `LAYOUTS`; told from the fields of the first row when None.
        split, subset: which part of a folder or of a dataset on the hub (its "split" and "config" there).
        calculator: keep GSM8K's `<<48/2=24>>` in the solutions.

    Raises:
        InputError: there is no such source, it is empty, or a row is malformed (the message names file and line).
    """
    if layout is not None and layout not in LAYOUTS:
        raise InputError(f"layout '{layout}' is unknown; choose one of {', '.join(LAYOUTS)}")
    path = Path(source).expanduser()
    rows = _file_rows(path) if _is_file_name(path) else _dataset_rows(str(source), split, subset)
    examples: list[Example] = []
    seen: set[str] = set()
    count = 0
    for count, (fields, where) in enumerate(rows, start=1):
        if not isinstance(fields, Mapping):
            raise InputError(f"{where}: this is not a JSON object; write one object of fields per row")
        layout = layout or tell_layout(fields, where)
        example = read_row(layout, count - 1, fields, where)
        if layout in REPEATING_LAYOUTS:
            key = json.dumps(example.prompt)
            if key in seen:
                continue
            seen.add(key)
        if not calculator and example.solution is not None:
            example = replace(example, solution=strip_calculator(example.solution))
        examples.append(example)
    if layout is None or not examples:
        raise InputError(f"'{source}' holds no rows; give a dataset with at least one")
    return LoadedExamples(examples, layout, count - len(examples))


def _is_file_name(path: Path) -> bool:
    return path.is_file() or path.name.endswith(_FILE_KINDS)


def _file_rows(path: Path) -> Rows:
    if not path.is_file():
        raise InputError(f"file '{path}' does not exist; give an existing file or a dataset name on the hub")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if not path.name.endswith(_FILE_KINDS):
        raise InputError(f"'{path}' is of no known kind; give a file that ends in {', '.join(_FILE_KINDS)}")
    return _json_rows(path)


def _json_rows(path: Path) -> Rows:
    """Rows of JSON lines, or of one JSON array; blank lines do not count as rows."""
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() == b"":
                    continue
                if line.lstrip()[:1] == b"[":
                    yield from _array_rows(path, line + file.read(), number)
                    return
                yield _parse(line, path, number), f"{path}, line {number}"
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read after line {number} ({error}); copy it again") from error


def _array_rows(path: Path, text: bytes, first_line: int) -> Rows:
    for i, fields in enumerate(_parse(text, path, first_line), start=1):
        yield fields, f"{path}, item {i}"


def _parse(text: bytes, path: Path, line: int) -> Any:
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        at = f"{path}, line {line + error.lineno - 1}"
        raise InputError(f"{at}: this is not valid JSON ({error.msg}); correct or remove it") from error
    except UnicodeDecodeError as error:
        at = f"{path}, line {line + text.count(bytes([10]), 0, error.start)}"
        raise InputError(f"{at}: this is not UTF-8 text; save the file as UTF-8") from error
    except RecursionError as error:
        raise InputError(f"{path}, line {line}: this is nested too deeply; correct or remove it") from error


def _parquet_rows(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield fields, f"{path}, row {number}"
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(f"{path} cannot be read after row {number} ({reason}); copy it again") from error


def _dataset_rows(name: str, split: str, subset: str | None) -> Rows:
    import datasets

    try:
        dataset = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises some thirty kinds, many of them multi-line
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InputError(
            f"dataset '{name}' (subset {subset}, split {split}) cannot be loaded ({reason}); "
            "give a local file, or check the name, the subset, the split and the network"
        ) from error
    return ((row, f"{name} [{split}], row {i}") for i, row in enumerate(dataset, start=1))


def encode_examples(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, max_prompt_tokens: int
) -> EncodedPrompts:
    """Encode the prompts with the tokenizer's chat template, up to where the response begins.

    A tokenizer without a chat template gets the bare text, with the special tokens it adds by itself.

    Raises:
        InputError: no prompt is left after those of more than `max_prompt_tokens` tokens were dropped.
    """
    encoded = _encode_prompts(examples, tokenizer)
    kept = [i for i, ids in enumerate(encoded) if 1 <= len(ids) <= max_prompt_tokens]
    if not kept:
        shortest = min(map(len, encoded), default=0)
        raise InputError(
            f"none of the {len(examples)} prompts has between 1 and {max_prompt_tokens} tokens "
            f"(the shortest has {shortest}); raise max_prompt_tokens"
        )
    tokens, lengths = _pad([encoded[i] for i in kept])
    row_ids = np.array([examples[i].row_id for i in kept], np.uint32)
    prompts = Prompts(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths), row_ids=jnp.asarray(row_ids))
    return EncodedPrompts(prompts, [examples[i] for i in kept], len(examples) - len(kept))


def encode_supervised(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, max_tokens: int
) -> SupervisedTexts:
    """Encode each prompt as `encode_examples` does, followed by its solution and the end token.

    The solution is `Example.solution`, or the answer where there is none.

    Raises:
        InputError: an example has neither, or no text of at most `max_tokens` tokens is left.
    """
    solutions = []
    for example in examples:
        solution = example.answer if example.solution is None else example.solution
        if solution is None:
            raise InputError(f"row {example.row_id} has neither a solution nor an answer to be trained on; remove it")
        solutions.append(solution)
    prompts = _encode_prompts(examples, tokenizer)
    answers = _encode_texts(solutions, tokenizer, special=False)
    texts = [[*prompt, *answer, tokenizer.eos_token_id] for prompt, answer in zip(prompts, answers, strict=True)]
    kept = [i for i, ids in enumerate(texts) if len(ids) <= max_tokens]
    if not kept:
        shortest = min(map(len, texts), default=0)
        raise InputError(
            f"none of the {len(examples)} supervised texts has at most {max_tokens} tokens "
            f"(the shortest has {shortest}); raise max_tokens"
        )
    tokens, lengths = _pad([texts[i] for i in kept])
    prompt_lengths = np.array([len(prompts[i]) for i in kept], np.int32)
    return SupervisedTexts(tokens, lengths, prompt_lengths, len(examples) - len(kept))


def _encode_prompts(examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    templated = tokenizer.chat_template is not None
    texts = [_render(example, tokenizer) if templated else _bare(example) for example in examples]
    return _encode_texts(texts, tokenizer, special=not templated)


def _render(example: Example, tokenizer: PreTrainedTokenizerFast) -> str:
    import jinja2

    messages = _messages(example)
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except jinja2.TemplateError as error:
        raise InputError(f"row {example.row_id}: the chat template refuses the prompt ({error}); remove it") from error


def _messages(example: Example) -> Messages:
    return [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt


def _bare(example: Example) -> str:
    return "\n\n".join(message["content"] for message in _messages(example))


def _encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerFast, special: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []


def _pad(rows: list[list[int]]) -> tuple[Int[np.ndarray, "n t"], Int[np.ndarray, "n"]]:
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths


def epoch_rows(seed: int, step: int, groups: int, num_examples: int) -> Int[np.ndarray, "g"]:
    """Which examples step `step` trains on: `groups` distinct indices below `num_examples`.

    Every epoch is shuffled anew from the seed and shows a row at most once. The remainder of `num_examples` over
    `groups`, other rows in every epoch, sits out: a step across two epochs could hold a row twice, and both of its
    groups would draw the same noise. Depends on nothing but the arguments, so a run resumes from its step number.

    Raises:
        InputError: there are fewer examples than groups.
    """
    if not 1 <= groups <= num_examples:
        raise InputError(
            f"a step of {groups} prompts cannot be drawn from {num_examples} examples without repeating one; "
            "use between 1 and that many prompts a step"
        )
    epoch, place = divmod(step, num_examples // groups)
    order = np.random.default_rng([seed, epoch]).permutation(num_examples)
    return order[place * groups : (place + 1) * groups]
