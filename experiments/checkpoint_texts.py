"""Built-in texts of `check_checkpoint`: 32 prompts with answers, as rows of tokens.

A policy need not answer like this; the answers only are text that whoever learned any finds likely. The sums are in
the symbols of the arithmetic task, so that its tokenizer has something to read too.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from transformers import PreTrainedTokenizerFast

from specrl_jax.data.jsonl import encode_examples, encode_supervised
from specrl_jax.data.layouts import Example
from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError

TEXTS: tuple[tuple[str, str], ...] = (
    (
        "What is the capital of France, and which river runs through it?",
        "The capital of France is Paris. The river Seine runs through the city.",
    ),
    (
        "Why is the sky blue?",
        "Air scatters short waves of light more than long ones, so blue light reaches us from every side of the sky.",
    ),
    (
        "Name the first four planets from the sun.",
        "The first four planets from the sun are Mercury, Venus, Earth and Mars.",
    ),
    (
        "Explain in one sentence what a thermometer does.",
        "A thermometer measures how warm or cold something is.",
    ),
    ("Translate into German: Good morning, my friend.", "Guten Morgen, mein Freund."),
    ("Give three synonyms of the word happy.", "Three synonyms of happy are glad, cheerful and joyful."),
    (
        "How many days does February have?",
        "February has 28 days, and 29 days in a leap year.",
    ),
    (
        "Write a short note that thanks a neighbour for watering the plants.",
        "Dear neighbour, thank you very much for watering the plants while we were away. They look wonderful.",
    ),
    (
        "Who wrote Hamlet?",
        "Hamlet was written by William Shakespeare around the year 1600.",
    ),
    (
        "What does a bee collect from flowers?",
        "A bee collects nectar and pollen from flowers. The nectar becomes honey.",
    ),
    (
        "Write a Python function that adds two numbers.",
        "def add(a, b):\n    return a + b",
    ),
    (
        "Write a Python loop that prints the numbers from 1 to 10.",
        "for i in range(1, 11):\n    print(i)",
    ),
    (
        "In Python, how do I reverse a list called items?",
        "You can reverse it in place with items.reverse(), or make a new list with items[::-1].",
    ),
    (
        "Write an SQL query that counts the rows of the table users.",
        "SELECT COUNT(*) FROM users;",
    ),
    (
        "Tom has 5 apples and buys 7 more. How many apples does he have?",
        "Tom has 5 + 7 = 12 apples. The answer is 12.",
    ),
    (
        "A book has 120 pages. Anna reads 30 pages a day. How many days does she need?",
        "Anna needs 120 / 30 = 4 days. The answer is 4.",
    ),
    (
        "A train travels 60 miles in one hour. How far does it travel in 3 hours?",
        "It travels 60 * 3 = 180 miles. The answer is 180.",
    ),
    (
        "Each box holds 12 eggs. How many eggs are in 5 boxes?",
        "There are 12 * 5 = 60 eggs. The answer is 60.",
    ),
    (
        "Maria had 50 dollars and spent 18 dollars. How much is left?",
        "She has 50 - 18 = 32 dollars left. The answer is 32.",
    ),
    (
        "A class has 14 girls and 11 boys. How many students are in the class?",
        "The class has 14 + 11 = 25 students. The answer is 25.",
    ),
    (
        "Sam shares 24 sweets equally among 6 friends. How many does each friend get?",
        "Each friend gets 24 / 6 = 4 sweets. The answer is 4.",
    ),
    (
        "A shirt costs 20 dollars and is sold at half price. What is the new price?",
        "Half of 20 dollars is 20 / 2 = 10 dollars. The answer is 10.",
    ),
    (
        "What is the area of a rectangle 6 meters long and 3 meters wide?",
        "The area is 6 * 3 = 18 square meters. The answer is 18.",
    ),
    ("Solve for x: 2x + 3 = 11.", "Subtract 3 from both sides: 2x = 8. Divide by 2: x = 4. The answer is 4."),
    ("16+972-353-51=", "988-353-51=635-51=584"),
    ("36-11+72=", "25+72=97"),
    ("85+505-55-32+5=", "590-55-32+5=535-32+5=503+5=508"),
    ("17+92-45+859+34=", "109-45+859+34=64+859+34=923+34=957"),
    ("57+85+52-33+49=", "142+52-33+49=194-33+49=161+49=210"),
    ("838-2-7-94+77=", "836-7-94+77=829-94+77=735+77=812"),
    ("53+2+71+32=", "55+71+32=126+32=158"),
    ("40+396+5+9=", "436+5+9=441+9=450"),
)


@dataclass(frozen=True, eq=False)
class Encoded:
    """prompts: as a policy answers them. texts: tokens of prompt, answer and end token of each. answer_at: of each, the
    token that its answer begins with. answers: as they were written. left_out: prompts that the tokenizer cannot spell.
    """

    prompts: Prompts
    texts: tuple[tuple[int, ...], ...]
    answer_at: tuple[int, ...]
    answers: tuple[str, ...]
    left_out: int


def _spells(tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    return tokenizer.unk_token_id is None or tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def encode(tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> Encoded:
    """The texts in the tokenizer's chat template, where it has one; InputError where it can spell none of them."""
    rows = enumerate(TEXTS)
    examples = [Example(i, prompt, answer) for i, (prompt, answer) in rows if _spells(tokenizer, prompt + answer)]
    if not examples:
        raise InputError("the policy's tokenizer can spell none of the built-in texts; use a tokenizer of text or sums")
    texts = encode_supervised(examples, tokenizer, max_tokens)
    if texts.dropped:
        raise InputError(f"--max-new-tokens leaves {max_tokens} tokens for a prompt and its answer; lower it")
    kept = encode_examples(examples, tokenizer, max_tokens)
    lines = tuple(tuple(map(int, row[:length])) for row, length in zip(texts.tokens, texts.lengths, strict=True))
    answers = tuple(str(example.answer) for example in examples)
    return Encoded(kept.prompts, lines, tuple(map(int, texts.prompt_lengths)), answers, len(TEXTS) - len(examples))


def byte_costs(answers: tuple[str, ...]) -> Float[np.ndarray, "n"]:
    """Nats per byte of every answer, by the frequencies of bytes in all of them."""
    rows = [np.frombuffer(answer.encode(), np.uint8) for answer in answers]
    counts = np.bincount(np.concatenate(rows), minlength=256)
    costs = -np.log(np.maximum(counts, 1) / counts.sum())
    return np.array([costs[row].mean() for row in rows])


def long_rows(encoded: Encoded, rows: int, length: int, seed: int) -> Int[np.ndarray, "r t"]:
    """Rows of `length` tokens: the texts one after the other, again and again, each time in another order."""
    rng = np.random.default_rng(seed)

    def row() -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length:
            for i in rng.permutation(len(encoded.texts)):
                tokens.extend(encoded.texts[i])
        return tokens[:length]

    return np.array([row() for _ in range(rows)], np.int32)


def renamed(encoded: Encoded, special: set[int], seed: int) -> tuple[tuple[int, ...], ...]:
    """The texts with the tokens that occur in them exchanged for one another, all but the special ones.

    To who learned these texts' language that is nonsense of the same tokens, as text is of another tokenizer.
    """
    used = sorted({token for text in encoded.texts for token in text} - special)
    names = dict(zip(used, np.random.default_rng(seed).permutation(used).tolist(), strict=True))
    return tuple(tuple(names.get(token, token) for token in text) for text in encoded.texts)
