"""Small policies as drafters from their Hugging Face folders."""

from pathlib import Path
from typing import Any

from specrl_jax.data.tokenizers import has_tokenizer, load_tokenizer, shared_ids
from specrl_jax.drafters.small_policy import SmallPolicyDrafter
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import load_config, load_policy, resolve_folder
from specrl_jax.models.params import PolicyParams


def is_small_policy(hf: dict[str, Any]) -> bool:
    """Whether a config.json is of a policy; heads that go by a policy's architecture have a draft vocabulary."""
    architecture = str((hf.get("architectures") or [""])[0])
    is_head = "Eagle3" in architecture or "draft_vocab_size" in hf or "speculators_model_type" in hf
    return architecture.endswith("ForCausalLM") and not is_head


def _shared_vocab(folder: Path, small: PolicyConfig, policy: PolicyConfig, tokenizer: Any) -> int:
    """Ids below this mean the same to both policies."""
    sizes = small.vocab_size, policy.vocab_size
    if tokenizer is None or not has_tokenizer(folder):
        if sizes[0] != sizes[1]:
            raise InputError(
                f"small policy {folder} has vocab_size {sizes[0]}, the policy {sizes[1]}, and no tokenizers tell which "
                "ids they share; save each one's tokenizer in its folder"
            )
        return sizes[0]
    try:
        return min(*sizes, shared_ids(load_tokenizer(folder), tokenizer))
    except InputError as error:
        raise InputError(f"small policy {folder} cannot draft: {error}") from None


def load_small_policy(
    source: str | Path, policy: PolicyConfig | None = None, tokenizer: Any = None
) -> tuple[SmallPolicyDrafter, PolicyParams]:
    """A small policy as drafter from a folder or a hub name, in the element type that its config.json names.

    Args:
        source: as for `load_policy`.
        policy: that it drafts for; where given, it must share the vocabulary.
        tokenizer: of that policy (transformers); compared with the small policy's own where there is one.

    Raises:
        InputError: as `load_policy`, or ids mean other tokens to the small policy than to the policy.
    """
    folder = resolve_folder(source, "draft model")
    config = load_config(folder)
    shared = config.vocab_size if policy is None else _shared_vocab(folder, config, policy, tokenizer)
    params, config = load_policy(folder)
    return SmallPolicyDrafter(config, shared), params
