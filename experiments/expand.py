"""A small trained policy and its draft head as ones with the cost of a real shape and the same outputs.

Net2Net expansion (arXiv 1511.05641) to 25M to 8B parameters, for benchmarks: tokens, acceptance and rewards are those
of the small pair, time is that of the shape. `--policy runs/demo/policy --drafter runs/demo/drafter --target 8b` writes
OUT/policy, which transformers loads unchanged, and OUT/drafter. Both are compared with the small pair before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from experiments.common import Run, RunOptions, check_least, run_main
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.setup import draft_head_config
from specrl_jax.data.tokenizers import arithmetic_tokenizer, load_tokenizer
from specrl_jax.drafters.eagle3 import Eagle3Drafter, draft_logits
from specrl_jax.drafters.eagle3_expansion import expand_pair, expanded_head_config
from specrl_jax.drafters.eagle3_folder import load_eagle3, save_eagle3, with_policy_embedding
from specrl_jax.drafters.eagle3_params import init_eagle3
from specrl_jax.drafters.small_policy import SmallPolicyDrafter
from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype, PolicyConfig
from specrl_jax.models.expansion import expand_policy
from specrl_jax.models.expansion_shapes import SHAPES, Shape, expanded_config
from specrl_jax.models.huggingface import check_tokenizer_fits, load_config, load_policy, save_policy
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams, init_params
from specrl_jax.models.policy import forward, grid_batch, logits, sequence_positions
from specrl_jax.models.presets import PRESETS as POLICIES
from specrl_jax.training.metrics import write_json

SCRIPT = "expand"
# Logits of new ids must lie this far below the largest, in nats.
_LEAST_MARGIN = 30.0


@dataclass(frozen=True)
class Config:
    """Options of the expansion."""

    run: Run = RunOptions()
    policy: str | None = None
    """Folder or hub name of a small Qwen3 policy; only --preset smoke does without and takes random weights."""
    drafter: str | None = None
    """Folder or hub name of the policy's draft head; without one only the policy is expanded."""
    target: str = "deep-95m"
    """Shape: 25m, deep-95m, 0.6b, 1.7b, 4b or 8b; toy tries things out."""
    dtype: Dtype | None = None
    """Type of the expanded weights; by default float32 below 0.6b and bfloat16 from there on."""
    check_tokens: int = 32
    """Tokens of each of two random sequences on which large and small are compared."""

    def __post_init__(self) -> None:
        check_least("", self, check_tokens=1)
        if self.target not in SHAPES:
            raise InputError(f"--target is {self.target}; choose one of {', '.join(SHAPES)}")

    @property
    def mesh(self) -> str:
        """One device."""
        return "data=1"

    @property
    def shape(self) -> Shape:
        """Sizes and type of the result."""
        shape = SHAPES[self.target]
        return shape if self.dtype is None else replace(shape, dtype=self.dtype)


PRESETS: dict[str, Mapping[str, Any]] = {"default": {}, "smoke": {"target": "25m"}}


@dataclass(frozen=True, eq=False)
class Pair:
    """A policy and, where there is one, what drafts for it: a head, or a small policy at its own size."""

    params: PolicyParams
    policy: PolicyConfig
    draft: Any = None
    drafter: Eagle3Drafter | SmallPolicyDrafter | None = None


def open_pair(config: Config) -> tuple[Pair, PreTrainedTokenizerFast]:
    """The small pair and the policy's tokenizer.

    Raises:
        InputError: a folder is missing or damaged, its parts do not belong together, or do not fit the target.
    """
    if config.policy is None:
        if config.run.preset != "smoke" or config.drafter is not None:
            raise InputError("--policy is missing; give the folder or hub name of a policy")
        return random_pair(config.run.seed), arithmetic_tokenizer()
    policy = load_config(config.policy)
    tokenizer = load_tokenizer(config.policy)
    check_tokenizer_fits(tokenizer, policy)
    return load_pair(config.policy, config.drafter, config.shape), tokenizer


def load_pair(source: str, head: str | None, shape: Shape) -> Pair:
    """A policy and its draft head from their folders; InputError where one cannot be used or expanded to the shape."""
    params, policy = load_policy(source)
    expanded_config(policy, shape)  # refuses a policy that does not fit
    if head is None:
        return Pair(params, policy)
    drafter, draft = with_policy_embedding(*load_eagle3(head, policy), params.embed)
    expanded_head_config(drafter.config, policy, shape)  # and so a head
    return Pair(params, policy, draft, drafter)


def random_pair(seed: int) -> Pair:
    """A policy and a head of random weights over the arithmetic vocabulary."""
    policy = replace(POLICIES["tiny-qwen3"], vocab_size=len(arithmetic_tokenizer()))
    policy_key, draft_key = jax.random.split(jax.random.key(seed))
    params = init_params(policy_key, policy)
    head = draft_head_config(policy)
    return Pair(params, policy, init_eagle3(draft_key, head, policy=params), Eagle3Drafter(head))


def expand(pair: Pair, shape: Shape, seed: int) -> Pair:
    """The pair in a larger shape."""
    key = jax.random.key(seed)
    if not isinstance(pair.drafter, Eagle3Drafter):
        params, policy = expand_policy(key, pair.params, pair.policy, shape)
        return replace(pair, params=params, policy=policy)
    params, policy, draft, head = expand_pair(key, pair.params, pair.policy, pair.draft, pair.drafter.config, shape)
    return Pair(params, policy, draft, Eagle3Drafter(head))


def outputs(pair: Pair, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits of every position, and the head's after it has read each whole sequence."""
    rows, width = tokens.shape
    batch = grid_batch(jnp.asarray(tokens), sequence_positions(jnp.full((rows,), width, jnp.int32), width))
    drafter = pair.drafter
    assert not isinstance(drafter, SmallPolicyDrafter)
    boundaries = () if drafter is None else drafter.config.boundaries

    @jax.jit
    def compute(params: Any, draft: Any) -> Any:
        out = forward(params, pair.policy, batch, numerics=Numerics(), boundaries=boundaries)
        scores = logits(params, pair.policy, out.hidden, Numerics())
        if drafter is None or out.features is None:
            return scores, None
        features = out.features.reshape(rows, width, -1)[:, :-1]
        read = (batch.tokens.reshape(rows, width)[:, 1:], features, jnp.full((rows,), width - 1, jnp.int32))
        state = drafter.commit(draft, params.embed, drafter.init_state(rows, width), *read)
        return scores, draft_logits(drafter.config, draft.weights, state.hidden)

    scores, drafted = compute(pair.params, pair.draft)
    return np.asarray(scores), None if drafted is None else np.asarray(drafted)


def compare(small: Pair, large: Pair, tokens: np.ndarray) -> dict[str, Any]:
    """Largest difference of logits over old ids, and how far those of new ids lie below the maximum.

    Raises:
        InputError: they do not lie far enough below it.
    """
    figures: dict[str, Any] = {}
    for name, ours, theirs in zip(("", "draft_"), outputs(large, tokens), outputs(small, tokens), strict=True):
        if ours is None or theirs is None:
            continue
        kept = theirs.shape[1]
        margin = float((theirs.max(-1) - ours[:, kept:].max(-1, initial=-np.inf)).min())
        if margin < _LEAST_MARGIN:
            raise InputError(
                f"logits of new ids lie only {margin:.3g} below the largest of the {'head' if name else 'policy'}, "
                "whose residual stream is too large; choose another policy"
            )
        figures |= {
            f"{name}logit_difference": float(np.abs(ours[:, :kept] - theirs).max()),
            f"{name}logit_scale": float(np.abs(theirs).max()),
            f"{name}padded_margin": margin if np.isfinite(margin) else None,
        }
    return figures


def size(tree: Any) -> int:
    """Numbers in a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def main(config: Config) -> None:
    """Load, expand, compare, write and print."""
    check_output(config.run, SCRIPT, policy=config.policy, drafter=config.drafter)
    small, tokenizer = open_pair(config)
    large = expand(small, config.shape, config.run.seed)
    rng = np.random.default_rng(config.run.seed)
    tokens = rng.integers(small.policy.vocab_size, size=(2, 1 + config.check_tokens)).astype(np.int32)
    row = {
        "target": config.target,
        "dtype": config.shape.dtype,
        "policy_parameters": size(large.params),
        "small_policy_parameters": size(small.params),
        "head_parameters": None if large.draft is None else size(large.draft.weights),
        "small_head_parameters": None if small.draft is None else size(small.draft.weights),
        **compare(small, large, tokens),
    }
    out = open_output(config.run, config, SCRIPT)
    save_policy(out / "policy", large.params, large.policy, tokenizer)
    if isinstance(large.drafter, Eagle3Drafter):
        save_eagle3(out / "drafter", large.drafter, large.draft)
    source = provenance(config.run.seed)
    write_results(out, [row], "Function-preserving expansion", source)
    write_json(out / "summary.json", row | source)
    print(markdown_table([{"figure": name, "value": value} for name, value in row.items()]), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
