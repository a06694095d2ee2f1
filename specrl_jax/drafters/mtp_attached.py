"""Heads in the layouts of other families for policies that have none, in proportion to the policy."""

from dataclasses import replace

from specrl_jax.drafters.mtp_dialects import mtp_config
from specrl_jax.drafters.mtp_layouts import (
    LAYOUTS,
    Attention,
    Dense,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    LayoutName,
    MtpConfig,
)
from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig

WITH_EXPERTS = ("qwen3_5_moe", "qwen3_next", "nemotron_h", "deepseek_v3")


def _attention(policy: PolicyConfig, layout: LayoutName) -> Attention:
    """Of the policy's heads; Qwen rotates a quarter of a head and Nemotron nothing."""
    width = policy.head_dim
    if layout == "deepseek_v3":
        rank = max(policy.hidden_size // 4, 1)
        return LatentAttention(policy.num_heads, 2 * rank, rank, width, max(width // 4 * 2, 2), width)
    if layout == "nemotron_h":
        return GroupedAttention(policy.num_heads, policy.num_kv_heads, width, rotary_width=0)
    rotary = max(width // 8 * 2, 2)
    return GroupedAttention(policy.num_heads, policy.num_kv_heads, width, rotary, qk_norm=True, gate=True)


def _feed_forward(policy: PolicyConfig, layout: LayoutName, experts: int, chosen: int) -> FeedForward:
    """Experts that are together as wide as the policy's MLP where a token reads them and the shared one."""
    if layout == "qwen3_5":
        return Dense(policy.intermediate_size)
    width = max(policy.intermediate_size // (chosen + 1), 1)
    if layout in ("qwen3_5_moe", "qwen3_next"):
        return Experts(experts, chosen, width, width, shared_gate=True)
    return Experts(experts, chosen, width, width, gated=layout != "nemotron_h", sigmoid=True)


def attached_config(
    policy: PolicyConfig,
    layout: LayoutName,
    draft_vocab_size: int | None = None,
    experts: int = 8,
    experts_per_token: int = 2,
) -> MtpConfig:
    """A head in this layout for a policy of any family.

    Args:
        policy: whose width, heads and vocabulary it has.
        layout: of `mtp_layouts.LAYOUTS`.
        draft_vocab_size: tokens that it proposes; None for all.
        experts, experts_per_token: where the layout has experts, how many, and how many of them a token reads.
    """
    if layout not in LAYOUTS:
        raise InputError(f"mtp head layout is {layout!r}; choose one of {', '.join(LAYOUTS)}")
    config = mtp_config(policy, draft_vocab_size)
    if layout == "mimo":
        return config
    feed_forward = _feed_forward(policy, layout, experts, experts_per_token)
    attention = _attention(policy, layout)
    return replace(config, layout=LAYOUTS[layout], attention=attention, feed_forward=feed_forward)
