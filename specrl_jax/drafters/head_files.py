"""What folders of draft heads share: safetensors checked tensor by tensor, and the maps of a draft vocabulary.

`d2t` holds for each draft token the offset to its target token, `t2d` which target tokens are in the draft vocabulary.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from safetensors import safe_open
from transformers import AutoConfig

from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.folders import replaced_folder
from specrl_jax.models.weights import INDEX_FILE, WEIGHTS_FILE, tensor_headers, weight_map, write_tensors

OFFSETS, MEMBERS = "d2t", "t2d"
PICKLED = ("*.bin", "*.pt", "*.pth")
"""Patterns of files with pickled weights."""
_TYPES = {OFFSETS: ("I64", "I32"), MEMBERS: ("BOOL",)}
_FLOATS = ("F64", "F32", "F16", "BF16")
_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")  # copies of the policy's

Shapes = Mapping[str, tuple[int, ...]]


def whole_layer(layer: Mapping[str, Any], default: str) -> dict[str, Any]:
    """A layer's config as transformers fills it in: only what differs from its defaults is written by speculators."""
    given = dict(layer)
    model_type = given.pop("model_type", default)
    try:
        return dict(AutoConfig.for_model(model_type, **given).to_dict())
    except Exception as error:  # transformers raises errors of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"draft head config has layers that transformers does not understand ({reason})") from error


def integers(hf: Mapping[str, Any], name: str) -> list[int] | None:
    """A list of integers of a config.json, or None where there is none."""
    found = hf.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not found or not all(type(i) is int for i in found):
        raise InputError(f"draft head config has {name} = {found!r}; a list of integers is needed")
    return found


def by_name(weights: Any) -> dict[str, Array]:
    """The arrays of a head's weights by the names of its `weight_shapes`: fields and places, joined by dots."""
    leaves, _ = jax.tree.flatten_with_path(weights)
    return {jax.tree_util.keystr(path, simple=True, separator="."): array for path, array in leaves}


def check_fits(kind: str, hidden_size: int, vocab_size: int, boundaries: tuple[int, ...], policy: PolicyConfig) -> None:
    """Raise InputError unless a head, called `kind`, was made for a policy of this shape."""
    for name, ours, theirs in (
        ("hidden_size", hidden_size, policy.hidden_size),
        ("vocab_size", vocab_size, policy.vocab_size),
    ):
        if ours != theirs:
            raise InputError(f"{kind} was made for a policy of {name} {ours}, not {theirs}; use that policy's head")
    if boundaries[-1] > policy.num_layers:
        raise InputError(
            f"{kind} reads boundaries {boundaries} of a policy with {policy.num_layers} layers; "
            "give the boundaries that it was trained with"
        )


def has_weights(folder: Path) -> bool:
    """Whether safetensors are there."""
    return any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))


def weights_files(folder: Path) -> list[Path]:
    """The folder's safetensors; InputError where there are none, or pickles in their place."""
    if has_weights(folder):
        return sorted(set(weight_map(folder).values()))
    if any(list(folder.glob(pattern)) for pattern in PICKLED):
        raise InputError(
            f"{folder} holds pickled weights, which can run code; convert them with "
            f"`python -m experiments.convert --source {folder} --out FOLDER`"
        )
    raise InputError(f"{folder} lacks {WEIGHTS_FILE}; give the folder of a draft head")


def vocab_maps(target_ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """The maps of a draft vocabulary; none where it is the whole one, which vLLM wants without."""
    ids = np.asarray(target_ids, np.int64)
    if len(ids) == vocab_size:
        return {}
    members = np.zeros((vocab_size,), bool)
    members[ids] = True
    return {OFFSETS: ids - np.arange(len(ids)), MEMBERS: members}


def save_head(folder: str | Path, hf: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Write a head; an earlier head in that folder is replaced as a whole, anything else there is refused."""
    folder = Path(folder)
    if folder.exists() and not (folder / "config.json").exists() and (folder.is_file() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and holds no draft head; choose another folder to save the head in")
    with replaced_folder(folder) as fresh:
        (fresh / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
        write_tensors(fresh, tensors, shard_bytes=1 + sum(tensor.nbytes for tensor in tensors.values()))


def read_tensors(
    files: Collection[Path],
    expected: Shapes,
    optional: Collection[str],
    draft_vocab_size: int,
    vocab_size: int,
    canonical: Callable[[str], str | None],
) -> dict[str, np.ndarray]:
    """All tensors by canonical name, after checks of names, shapes and element types.

    Args:
        expected: shapes by canonical name, without the maps of the draft vocabulary. optional: may be missing.
        canonical: our name for a tensor's name in the files; None for those of the policy.

    Raises:
        InputError: a tensor is missing, unknown, of another shape or type; names it.
    """
    expected = {**expected, OFFSETS: (draft_vocab_size,), MEMBERS: (vocab_size,)}
    optional = {*optional, MEMBERS, *([OFFSETS] if draft_vocab_size == vocab_size else [])}
    stored: dict[str, tuple[Path, str]] = {}
    headers = [(file, name, *header) for file in files for name, header in tensor_headers(file).items()]
    for file, name, shape, kind in headers:
        known = canonical(name)
        if known is None or name.endswith(_IGNORED):
            continue
        if known not in expected or known in stored:
            raise InputError(f"{file} has the unexpected tensor {name}; its config.json asks for no such weight")
        if shape != expected[known]:
            raise InputError(
                f"{file} has tensor {name} of shape {list(shape)} where config.json asks for "
                f"{list(expected[known])}; use the config.json that belongs to these weights"
            )
        if kind not in _TYPES.get(known, _FLOATS):
            raise InputError(f"{file} has tensor {name} of type {kind}; only unquantized heads are supported")
        stored[known] = (file, name)
    for name in expected:
        if name not in stored and name not in optional:
            where = ", ".join(map(str, files))
            raise InputError(f"{where} lacks tensor {name}; its weights do not belong to its config.json")
    found = {}
    for known, (file, name) in stored.items():
        with safe_open(file, framework="numpy") as opened:
            found[known] = opened.get_tensor(name)
    return found


def read_target_ids(
    folder: Path, tensors: Mapping[str, np.ndarray], draft_vocab_size: int, vocab_size: int
) -> np.ndarray:
    """Target token of every draft token. `d2t` decides: it may be in any order, so `t2d` can only be checked."""
    ids, members = np.arange(draft_vocab_size), tensors.get(MEMBERS)
    if OFFSETS in tensors:
        ids = ids + tensors[OFFSETS].astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
        raise InputError(f"{folder} has a d2t that names a token twice or outside the vocabulary; download it again")
    if members is not None and not (members.sum() == len(ids) and members[ids].all()):
        raise InputError(f"{folder} has a t2d that does not belong to its d2t; download it again")
    return ids.astype(np.int32)
