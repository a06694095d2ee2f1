"""Draft models of every kind behind one door: made, trained, saved and loaded by what their configuration says.

Draft heads are EAGLE-3 heads (`eagle3`), native MTP heads (`mtp`) and block drafters (`block`): a configuration, a
drafter that the rollout uses, and parameters of which `weights` is what training changes. A small policy
(`small_policy`) drafts as it is.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specrl_jax.data.tokenizers import has_tokenizer, load_tokenizer, shared_ids
from specrl_jax.drafters.block import BlockDrafter
from specrl_jax.drafters.block_folder import is_block_drafter, load_block, save_block
from specrl_jax.drafters.block_params import BlockConfig, BlockParams, init_block
from specrl_jax.drafters.block_training import block_counts, block_loss
from specrl_jax.drafters.draft_losses import DraftBatch, DraftCounts, DraftLossConfig, DraftMetrics, Shared
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_folder import load_eagle3, save_eagle3, with_policy_embedding
from specrl_jax.drafters.eagle3_params import Eagle3Config, Eagle3Params, init_eagle3
from specrl_jax.drafters.eagle3_training import draft_counts, draft_loss
from specrl_jax.drafters.head_files import has_weights
from specrl_jax.drafters.mtp import MtpDrafter, beside_policy, is_mtp_head, lies_with_policy, load_mtp, save_mtp
from specrl_jax.drafters.mtp_layouts import MtpConfig
from specrl_jax.drafters.mtp_params import MtpParams, init_mtp
from specrl_jax.drafters.small_policy import SmallPolicyDrafter
from specrl_jax.drafters.small_policy_folder import is_small_policy, load_small_policy
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import resolve_folder
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import head_weights
from specrl_jax.models.weights import read_json
from specrl_jax.parallel.hosts import is_first, whole

HeadConfig = Eagle3Config | MtpConfig | BlockConfig
HeadDrafter = Eagle3Drafter | MtpDrafter | BlockDrafter
HeadParams = Eagle3Params | MtpParams | BlockParams
DraftModel = HeadDrafter | SmallPolicyDrafter
DraftModelParams = HeadParams | PolicyParams


def drafter_for_head(config: HeadConfig) -> HeadDrafter:
    """What the rollout uses."""
    if isinstance(config, BlockConfig):
        return BlockDrafter(config)
    return MtpDrafter(config) if isinstance(config, MtpConfig) else Eagle3Drafter(config)


def init_head(
    key: Any,
    config: HeadConfig,
    policy: PolicyParams,
    target_ids: np.ndarray | None = None,
    feature_rms: float = 1.0,
) -> HeadParams:
    """A new head; arguments as for `eagle3_params.init_eagle3`."""
    if isinstance(config, BlockConfig):
        return init_block(key, config, policy, target_ids, feature_rms)
    if isinstance(config, MtpConfig):
        return init_mtp(key, config, target_ids, policy)
    return init_eagle3(key, config, target_ids, policy, feature_rms)


def shared_with_head(policy: PolicyParams) -> Shared:
    """What the training of a head reads of the policy."""
    return Shared(policy.embed, head_weights(policy)[1])


def head_counts(
    config: HeadConfig, params: HeadParams, shared: Shared, batch: DraftBatch, loss: DraftLossConfig
) -> DraftCounts:
    """Drafts that count at each step."""
    if isinstance(config, BlockConfig):
        return block_counts(params.target_ids, shared.head, batch, config, loss)
    return draft_counts(params.target_ids, shared.head, batch, loss)


def head_loss(
    weights: Any,
    params: HeadParams,
    shared: Shared,
    batch: DraftBatch,
    config: HeadConfig,
    loss: DraftLossConfig,
    counts: DraftCounts,
) -> tuple[Float[Array, ""], DraftMetrics]:
    """Loss and metrics of a part of a batch; `weights` are those of `params`, by which it is differentiated."""
    if isinstance(config, BlockConfig):
        assert isinstance(params, BlockParams)
        return block_loss(weights, params, shared, batch, config, loss, counts)
    assert not isinstance(params, BlockParams)
    weights = params.with_rows(weights)
    shared = replace(shared, embed=params.embedding(shared.embed))
    return draft_loss(weights, params.target_ids, shared, batch, config, loss, counts)


def save_drafter(folder: str | Path, drafter: HeadDrafter, params: HeadParams) -> None:
    """Write a head; an earlier head in that folder is replaced as a whole, anything else there is refused.

    Of several processes the first writes.
    """
    params = whole(params)
    if not is_first():
        return
    if isinstance(drafter, BlockDrafter):
        assert isinstance(params, BlockParams)
        save_block(folder, drafter, params)
    elif isinstance(drafter, MtpDrafter):
        assert isinstance(params, MtpParams)
        save_mtp(folder, drafter, params)
    else:
        assert isinstance(params, Eagle3Params)
        save_eagle3(folder, drafter, params)


def beside_its_policy(source: str | Path | None, drafter: Any, params: Any) -> Any:
    """A trained head as `huggingface.save_policy` takes it, where the policy's folder `source` carries a native head.

    None where that folder has none, or the head is of another kind.
    """
    if source is None or not isinstance(drafter, MtpDrafter) or not isinstance(params, MtpParams):
        return None
    hf = read_json(resolve_folder(source) / "config.json")
    return beside_policy(drafter, whole(params)) if lies_with_policy(hf) else None


def load_drafter(
    source: str | Path, policy: PolicyConfig | None = None, tokenizer: Any = None
) -> tuple[DraftModel, DraftModelParams]:
    """A draft model from a folder or a hub name, its kind told from config.json.

    `policy` and its `tokenizer` are what it must fit; see the four loaders.

    Raises:
        InputError: as the loaders, or the folder has a tokenizer of other tokens than the policy's.
    """
    folder = resolve_folder(source, "draft head")
    hf = read_json(folder / "config.json")
    if not Path(source).is_dir() and not has_weights(folder):
        # Pickles are not downloaded.
        raise InputError(
            f"{source} has no safetensors on the hub; if its weights are pickled, which can run code, convert them "
            f"with `python -m experiments.convert --source {source} --out FOLDER`"
        )
    if is_small_policy(hf) and not is_block_drafter(hf) and not is_mtp_head(hf):
        return load_small_policy(folder, policy, tokenizer)
    _check_tokenizer(folder, tokenizer)
    if is_block_drafter(hf):
        return load_block(folder, policy)
    if is_mtp_head(hf):
        return load_mtp(folder, policy)
    return load_eagle3(folder, policy)


def tokenizer_difference(source: str | Path, tokenizer: Any) -> str | None:
    """What sets the tokenizer of a draft model's folder or hub name apart from the policy's `tokenizer`.

    None where it has none of its own, or one to which every id is the same token.
    """
    folder = resolve_folder(source, "draft head")
    if not has_tokenizer(folder):
        return None
    try:
        shared_ids(load_tokenizer(folder), tokenizer)
    except InputError as error:
        return str(error)
    return None


def _check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """InputError where a head comes with a tokenizer of its own to which an id is another token."""
    apart = None if tokenizer is None else tokenizer_difference(folder, tokenizer)
    if apart is not None:
        raise InputError(f"draft head {folder} cannot draft: {apart}")


def with_policy_head(params: HeadParams, policy: PolicyParams) -> HeadParams:
    """The head with what it reads of the policy, such as its output rows, where it came without.

    A block head keeps the rows that its folder has until the policy learns.
    """
    return params if isinstance(params, Eagle3Params) or params.lm_head is not None else with_rows_of(params, policy)


def with_rows_of(params: Any, policy: PolicyParams) -> Any:
    """A head that reads a policy's output rows, an MTP or a block head, with those of this one; others as they are."""
    if isinstance(params, MtpParams):
        return params.with_policy(policy)
    if not isinstance(params, BlockParams):
        return params
    rows = head_weights(policy)[1][params.target_ids]
    return replace(params, lm_head=rows.astype(params.weights.final_norm.dtype))


def as_head(drafter: DraftModel) -> HeadDrafter:
    """The draft model as one that can be trained; InputError where it is a small policy."""
    if isinstance(drafter, SmallPolicyDrafter):
        raise InputError("--drafter is a small policy, which drafts as it is; give a draft head to train, or none")
    return drafter


def for_policy(
    drafter: DraftModel, params: DraftModelParams, policy: PolicyParams
) -> tuple[DraftModel, DraftModelParams]:
    """A loaded drafter that shares with its policy what is the policy's: an equal embedding, missing output rows.

    Raises:
        InputError: the head shares more than an embedding, and the policy has another vocabulary or width.
    """
    if isinstance(drafter, SmallPolicyDrafter):
        return drafter, params
    if isinstance(drafter, Eagle3Drafter):
        assert isinstance(params, Eagle3Params)
        return with_policy_embedding(drafter, params, policy.embed)
    assert not isinstance(params, PolicyParams)
    sizes = drafter.config.backbone if isinstance(drafter, BlockDrafter) else drafter.config
    if policy.embed.shape != (sizes.vocab_size, sizes.hidden_size):
        raise InputError(
            f"draft head reads an embedding of {sizes.vocab_size} tokens of width {sizes.hidden_size}, "
            f"not {jnp.shape(policy.embed)}; use that policy's head"
        )
    return drafter, with_policy_head(params, policy)
