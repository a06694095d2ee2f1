"""What the benchmarks share: an expanded policy with its draft head, and synthetic acceptance."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from experiments.expand import Pair, expand, load_pair, random_pair, size
from specrl_jax.data.tokenizers import arithmetic_tokenizer, load_tokenizer
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_folder import save_eagle3
from specrl_jax.drafters.small_policy import SmallPolicyDrafter
from specrl_jax.drafters.small_policy_folder import is_small_policy, load_small_policy
from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype
from specrl_jax.models.expansion_shapes import SHAPES, Shape
from specrl_jax.models.huggingface import resolve_folder, save_policy
from specrl_jax.models.tree import Tree
from specrl_jax.models.weights import read_json
from specrl_jax.rollout.rules import Match
from specrl_jax.rollout.verification import Proposed

PAUSE_S = 0.4  # between arms of several processes: a peer's threads spin for a while after their work


class OneDevice:
    """Options of a script that runs on one device."""

    @property
    def mesh(self) -> str:
        """One device."""
        return "data=1"


@dataclass(frozen=True)
class ShapeOptions:
    """Which policy, at which size."""

    policy: str | None = None
    """Folder of a small policy; by default random weights."""
    drafter: str | None = None
    """Folder of its draft head; bench_rollout and draft_length also take a small policy, which keeps its size."""
    shape: str = "deep-95m"
    """Size that policy and head are expanded to, outputs unchanged: 25m, deep-95m, 0.6b, 1.7b, 4b, 8b, or toy to try
    things out."""
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise InputError(f"--shape is {self.shape}; choose one of {', '.join(SHAPES)}")
        if (self.policy is None) != (self.drafter is None):
            raise InputError("--policy and --drafter belong together; give both, or neither for random weights")

    @property
    def target(self) -> Shape:
        """The size."""
        return replace(SHAPES[self.shape], dtype=self.dtype)


def open_expanded(options: ShapeOptions, seed: int) -> Pair:
    """The small pair, expanded; InputError when a folder cannot be used or does not fit the shape."""
    if options.policy is None or options.drafter is None:
        small = random_pair(seed)
    else:
        small = load_pair(options.policy, options.drafter, options.target)
    return expand(small, options.target, seed)


def open_expanded_or_small(options: ShapeOptions, seed: int) -> Pair:
    """As `open_expanded`; a small policy in the head's place is taken as it is."""
    source = options.drafter
    if source is None or not is_small_policy(read_json(resolve_folder(source, "draft head") / "config.json")):
        return open_expanded(options, seed)
    assert options.policy is not None
    small = load_pair(options.policy, None, options.target)
    drafter, draft = load_small_policy(source, small.policy, load_tokenizer(options.policy))
    return expand(replace(small, draft=draft, drafter=drafter), options.target, seed)


def save_pair(pair: Pair, options: ShapeOptions, folder: Path) -> None:
    """Write `folder`/policy and `folder`/drafter for a peer."""
    assert isinstance(pair.drafter, Eagle3Drafter)
    tokenizer = arithmetic_tokenizer() if options.policy is None else load_tokenizer(options.policy)
    save_policy(folder / "policy", pair.params, pair.policy, tokenizer)
    save_eagle3(folder / "drafter", pair.drafter, pair.draft)


def parts_of(pair: Pair, options: ShapeOptions) -> dict[str, Any]:
    """Policy, drafter and vocabulary of a row of a table."""
    drafter = pair.drafter
    assert drafter is not None
    ids = drafter.shared_vocab if isinstance(drafter, SmallPolicyDrafter) else drafter.config.draft_vocab_size
    return {
        "shape": options.shape,
        "source": options.policy or "random weights",
        "dtype": options.dtype,
        "policy_parameters": size(pair.params),
        "drafter_parameters": size(pair.draft),
        "vocabulary": pair.policy.vocab_size,
        "draft_vocabulary": ids,
    }


@dataclass(frozen=True)
class SyntheticMatch(Match):
    """Every draft is accepted with one probability, whatever it is. For benchmarks: its tokens are nobody's.

    A place in a response accepts all drafts that are tried there or none, as with a policy whose noise is keyed by
    place: arms that draft more and less meet the same luck.

    survival: of each further draft; 0.766 gives an acceptance length of 2.80 at three drafts, 0.877 one of 3.32.
    """

    survival: float = 0.766

    def decide(self, tree: Tree, drafts: Any, own: Any, log_p: Any, log_q: Any, draws: Any) -> Proposed:
        """Coins instead of comparisons; a slot without a draft is never accepted."""
        coins = draws.coins_by_place(jnp.full(drafts.shape, math.log(self.survival)))
        accepted = jnp.sum(jnp.cumprod((coins & (drafts >= 0)).astype(jnp.int32), axis=1), axis=1)
        slots = jnp.arange(own.shape[1], dtype=jnp.int32)[None]
        tokens = jnp.where(slots < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), own)
        return Proposed(tokens, accepted)
