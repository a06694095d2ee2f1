"""Architectures of public checkpoints, and tiny ones of the same families."""

from dataclasses import replace

from specrl_jax.models.config import Family, PolicyConfig, RopeConfig


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, *, tied: bool) -> PolicyConfig:
    return PolicyConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        tie_embeddings=tied,
        max_position_embeddings=40960,
        rope=RopeConfig(theta=1_000_000.0),
        dtype="bfloat16",
    )


_LLAMA_3_1_8B = PolicyConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    max_position_embeddings=131072,
    rope=RopeConfig(
        kind="llama3",
        theta=500_000.0,
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    dtype="bfloat16",
)


_MIMO_7B = PolicyConfig(
    family="qwen2",
    vocab_size=151680,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    max_position_embeddings=32768,
    rope=RopeConfig(theta=640_000.0),
    dtype="bfloat16",
)


def _tiny(family: Family) -> PolicyConfig:
    """Two layers of width 64; change the vocabulary to the tokenizer's with `dataclasses.replace`."""
    return PolicyConfig(
        family=family,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        tie_embeddings=True,
        max_position_embeddings=1024,
    )


PRESETS: dict[str, PolicyConfig] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "llama-3.1-8b": _LLAMA_3_1_8B,
    "mimo-7b": _MIMO_7B,
    "tiny-qwen3": _tiny("qwen3"),
    "tiny-qwen2": _tiny("qwen2"),
    "tiny-llama": replace(_tiny("llama"), tie_embeddings=False),
}
