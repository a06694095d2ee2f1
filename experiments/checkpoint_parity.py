"""A policy's logits beside those of transformers, where torch is installed."""

import importlib.util
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from experiments.checkpoint_verdict import Finding, row
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import resolve_folder

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}
"""Largest mean Kullback-Leibler divergence, in nats, that rounding explains."""


def has_torch() -> bool:
    """Whether torch is there."""
    return importlib.util.find_spec("torch") is not None


def their_logits(policy: str, dtype: str, tokens: Int[np.ndarray, "b t"]) -> Float[np.ndarray, "b t v"] | str:
    """The logits of transformers, or the reason why there are none."""
    if not has_torch():
        return "torch is not installed"
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(resolve_folder(policy), dtype=getattr(torch, dtype)).eval()
    except Exception as error:  # an architecture that it does not know raises errors of many kinds
        return f"transformers cannot load the policy ({str(error).strip().splitlines()[0][:120]})"
    with torch.no_grad():
        return np.asarray(model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.float().numpy())


def _log_softmax(logits: Float[np.ndarray, "n v"]) -> Float[np.ndarray, "n v"]:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def judge_parity(
    config: PolicyConfig, ours: Float[np.ndarray, "n v"], theirs: Float[np.ndarray, "n v"]
) -> tuple[list[Any], list[Finding]]:
    """Whether both give the same law, up to rounding."""
    p, q = _log_softmax(theirs), _log_softmax(ours)
    apart = float((np.exp(p) * (p - q)).sum(-1).mean())
    agree = float((p.argmax(-1) == q.argmax(-1)).mean())
    allowed = TOLERANCE[config.dtype]
    rows = [
        row("policy", "divergence from transformers", apart, None, allowed, "what rounding explains"),
        row("policy", "same likeliest token", agree),
    ]
    if apart <= allowed:
        return rows, []
    sentence = (
        f"policy: its law is {apart:.2g} nats from that of transformers, where rounding explains {allowed:g}; "
        "look at the fields of its config.json that this library does not read, and report it"
    )
    return rows, [Finding("policy", sentence)]
