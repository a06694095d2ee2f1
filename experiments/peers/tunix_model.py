"""A policy folder as a model of tunix, and a tokenizer that is none."""

import json
from pathlib import Path
from typing import Any

PAD, NEVER = -1, -2
"""Ids outside every vocabulary: padding, which tunix tells from tokens by its id alone, and an end that never comes."""


class IdTokenizer:
    """Texts are token ids in decimal, with spaces between them."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        """Text of ids."""
        return " ".join(map(str, ids))

    def bos_id(self) -> int | None:
        """None: nothing is put before a prompt."""
        return None

    def eos_id(self) -> int:
        """The end that never comes."""
        return NEVER

    def pad_id(self) -> int:
        """Padding."""
        return PAD


def load_qwen3(policy: str) -> Any:
    """The Qwen3 of a folder, float32."""
    import jax.numpy as jnp
    from tunix.models.qwen3 import model, params

    hf = json.loads((Path(policy) / "config.json").read_text(encoding="utf-8"))
    if hf["model_type"] != "qwen3":
        raise ValueError(f"{policy} holds a {hf['model_type']}; this peer takes qwen3")
    config = model.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=hf["rope_theta"],
        norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=hf["tie_word_embeddings"],
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    return params.create_model_from_safe_tensors(policy, config, dtype=jnp.float32)
