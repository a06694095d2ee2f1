"""What a tokenizer's ids mean as bytes, inside the graph.

In-graph tasks write their text as a sequence of symbols and judge responses as
bytes, so that every tokenizer is rewarded alike: a response counts by what it
says, not by how it was cut into tokens.
"""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped, UInt8

from specrl_jax.errors import InputError

SYMBOLS = "0123456789+-="
"""Symbols of the arithmetic task; symbol `i` is `SYMBOLS[i]`, digits stand for themselves."""

PLUS, MINUS, EQUALS, END = 10, 11, 12, 13
"""Indices of the symbols that are no digits; `END`, the end token, follows the last of `SYMBOLS`."""


@struct.dataclass
class SymbolTable:
    """A tokenizer as arrays.

    token_ids: token of every symbol, the end token last, `[14]` int32.
    token_bytes: bytes of every token, zero-padded, `[v, m]` uint8; special tokens have none.
    byte_lengths: bytes of every token, `[v]` int32.
    end_id: the end token.
    """

    token_ids: Int[Array, "s"]
    token_bytes: UInt8[Array, "v m"]
    byte_lengths: Int[Array, "v"]
    end_id: int = struct.field(pytree_node=False)


def symbol_table(tokenizer: Any) -> SymbolTable:
    """Read a fast tokenizer of `transformers` (byte-level BPE, SentencePiece or plain pieces).

    Raises InputError when it is no fast tokenizer, has no end token, or lacks one
    of `SYMBOLS` as a single token.
    """
    pieces = token_bytes(tokenizer)
    end_id = tokenizer.eos_token_id
    if end_id is None:
        raise InputError("the tokenizer has no end token (eos_token); set one, arithmetic responses must end with it")
    ids = [_symbol_id(tokenizer, pieces, symbol) for symbol in SYMBOLS]
    lengths = np.array([len(piece) for piece in pieces], np.int32)
    padded = np.zeros((len(pieces), max(1, lengths.max())), np.uint8)
    for row, piece in zip(padded, pieces, strict=True):
        row[: len(piece)] = np.frombuffer(piece, np.uint8)
    return SymbolTable(
        token_ids=jnp.asarray([*ids, end_id], jnp.int32),
        token_bytes=jnp.asarray(padded),
        byte_lengths=jnp.asarray(lengths),
        end_id=int(end_id),
    )


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Bytes of every token id of a fast tokenizer; special tokens and unused ids have none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"{type(tokenizer).__name__} is no fast tokenizer, so its bytes are unknown; load it with use_fast=True"
        )
    decoder = json.loads(backend.to_str())["decoder"]
    kinds = {part["type"] for part in _decoder_parts(decoder)}
    byte_of_char = {char: byte for byte, char in _byte_level_chars().items()}
    added = tokenizer.added_tokens_decoder
    silent = set(tokenizer.all_special_ids)
    vocabulary = tokenizer.get_vocab()
    pieces = [b""] * (max([*vocabulary.values(), *added]) + 1)
    for token, index in vocabulary.items():
        if index in silent or (index in added and added[index].special):
            continue
        if "ByteLevel" in kinds:
            # An added token that is not spelt in byte characters stands for itself, as in the library's own decoder.
            spelt = all(char in byte_of_char for char in token)
            pieces[index] = bytes(byte_of_char[char] for char in token) if spelt else token.encode()
        elif kinds & {"ByteFallback", "Metaspace"}:
            pieces[index] = _sentencepiece_bytes(token)
        else:
            pieces[index] = token.encode()
    return pieces


def _symbol_id(tokenizer: Any, pieces: list[bytes], symbol: str) -> int:
    """Id of the token that says exactly `symbol` (all symbols spell alike in every kind of vocabulary)."""
    index = tokenizer.get_vocab().get(symbol)
    if index is None or pieces[index] != symbol.encode():
        raise InputError(
            f"the tokenizer has no single token for {symbol!r}, which arithmetic problems need; "
            "choose a tokenizer that has every digit and + - = as tokens of their own"
        )
    return int(index)


def _decoder_parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _decoder_parts(inner)]
    return [decoder]


def _byte_level_chars() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (Radford et al. 2019, GPT-2)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


def _sentencepiece_bytes(token: str) -> bytes:
    """`<0x0A>` is the byte itself; `▁` is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def compact(
    values: Shaped[Array, "n s"], keep: Bool[Array, "n s"], width: int
) -> tuple[Shaped[Array, "n w"], Int[Array, "n"]]:
    """Move the kept values of every row to its front, in order; zeros follow. Returns them and their number."""
    slots = jnp.cumsum(keep, axis=1, dtype=jnp.int32) - 1
    rows = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None]
    out = jnp.zeros((values.shape[0], width), values.dtype)
    out = out.at[rows, jnp.where(keep, slots, width)].set(values, mode="drop")
    return out, jnp.sum(keep, axis=1, dtype=jnp.int32)


def detokenise(
    table: SymbolTable, tokens: Int[Array, "n t"], lengths: Int[Array, "n"]
) -> tuple[UInt8[Array, "n w"], Int[Array, "n"]]:
    """The text of the first `lengths[i]` tokens of every row: bytes `[n, t * m]`, zero-padded, and their number.

    Ids beyond the table (rows that pad an embedding) say nothing, as special tokens do.
    """
    n, t = tokens.shape
    max_bytes = table.token_bytes.shape[1]
    live = jnp.arange(t, dtype=jnp.int32)[None] < lengths[:, None]
    counts = jnp.where(live, table.byte_lengths.at[tokens].get(mode="fill", fill_value=0), 0)
    values = table.token_bytes.at[tokens].get(mode="fill", fill_value=0).reshape(n, t * max_bytes)
    keep = jnp.arange(max_bytes, dtype=jnp.int32)[None, None] < counts[:, :, None]
    return compact(values, keep.reshape(n, t * max_bytes), t * max_bytes)
