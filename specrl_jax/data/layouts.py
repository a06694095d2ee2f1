"""The layouts of well-known datasets: which field of a row is the prompt, the answer, the written solution."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specrl_jax.errors import InputError

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """One row of a dataset.

    row_id: its place in the source, counted from 0 before anything is dropped; it keys the noise of its rollouts.
    prompt: the user's text, or messages of the form `{"role": ..., "content": ...}`.
    answer: the reference answer, where there is one.
    solution: text that a policy may be supervised on, where there is one.
    fields: the row as it was read, for rewards that need more.
    """

    row_id: int
    prompt: str | Messages
    answer: str | None = None
    solution: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


Parts = tuple[str | Messages, str | None, str | None]


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` of `text`."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        depth = 0
        for end in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : end]
        start = text.rfind(r"\boxed{", 0, start)
    return None


def strip_calculator(text: str) -> str:
    """GSM8K's calculator annotations (`48/2 = <<48/2=24>>24`) removed."""
    return re.sub(r"<<[^<>]*>>", "", text)


class _Row:
    """A row whose fields are checked when they are read; `where` names file and line."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields, self.where = fields, where

    def bad(self, what: str) -> InputError:
        return InputError(f"{self.where}: {what}; correct or remove this row")

    def text(self, name: str, of: Mapping[str, Any] | None = None) -> str:
        value = (self.fields if of is None else of).get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            state = "is missing" if value is None else "is empty" if isinstance(value, str) else "is not text"
            raise self.bad(f"field '{name}' {state}")
        return value

    def optional(self, name: str) -> str | None:
        return None if self.fields.get(name) in (None, "") else self.text(name)

    def messages(self, name: str) -> Messages:
        messages = self.fields.get(name)
        if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
            raise self.bad(f"field '{name}' is not a list of messages")
        return [{"role": self.text("role", m), "content": self.text("content", m)} for m in messages]


def _gsm8k(row: _Row) -> Parts:
    solution = row.text("answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise row.bad("field 'answer' does not end with '#### ' and the answer")
    return row.text("question"), answer.strip(), solution


def _math(row: _Row) -> Parts:
    solution = row.optional("solution")
    answer = row.optional("answer") or last_boxed(solution or "")
    if not answer:
        raise row.bad(r"there is neither a field 'answer' nor a \boxed answer in field 'solution'")
    return row.text("problem"), answer, solution


def _dapo(row: _Row) -> Parts:
    reward_model = row.fields.get("reward_model")
    if not isinstance(reward_model, Mapping):
        raise row.bad("field 'reward_model' is not an object with a 'ground_truth'")
    return row.messages("prompt"), row.text("ground_truth", reward_model), None


def _chat(row: _Row) -> Parts:
    prompt, context = row.text("instruction"), row.optional("input")
    return prompt if context is None else f"{prompt}\n\n{context}", None, row.text("response")


def _generic(row: _Row) -> Parts:
    prompt = row.fields.get("prompt")
    return (
        row.messages("prompt") if isinstance(prompt, list) else row.text("prompt"),
        row.optional("answer"),
        row.optional("solution"),
    )


LAYOUTS: dict[str, Callable[[_Row], Parts]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "aime": _math,
    "dapo": _dapo,
    "chat": _chat,
    "generic": _generic,
}
# DAPO-Math-17k repeats each of its prompts about a hundred times.
REPEATING_LAYOUTS = frozenset({"dapo"})


def tell_layout(fields: Mapping[str, Any], where: str) -> str:
    """The layout of a dataset, told from the fields of its first row.

    Raises:
        InputError: the fields fit no layout.
    """
    names = set(fields)
    if {"prompt", "reward_model"} <= names:
        return "dapo"
    if "problem" in names and names & {"answer", "solution"}:
        return "aime" if "id" in names else "math"
    if {"question", "answer"} <= names and "####" in str(fields["answer"]):
        return "gsm8k"
    if {"instruction", "response"} <= names:
        return "chat"
    if "prompt" in names:
        return "generic"
    raise InputError(
        f"{where}: the fields {', '.join(sorted(map(str, names))) or '(none)'} fit no known layout "
        f"({', '.join(LAYOUTS)}); rename them to 'prompt' and 'answer'"
    )


def read_row(layout: str, row_id: int, fields: Mapping[str, Any], where: str) -> Example:
    """A row as an `Example`; `where` (file and line) opens the message when it does not fit the layout."""
    prompt, answer, solution = LAYOUTS[layout](_Row(fields, where))
    return Example(row_id, prompt, answer, solution, fields)
