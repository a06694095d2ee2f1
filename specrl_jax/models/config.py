"""Shapes of the decoder-only policies: Qwen3, Qwen2 and Llama-3."""

from dataclasses import dataclass
from typing import Literal

from specrl_jax.errors import InputError

Family = Literal["qwen3", "qwen2", "llama"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of Su et al. (arXiv 2104.09864) and its length extensions.

    kind: "default", "linear" (positions divided by `factor`), "llama3" (low
        frequencies divided by `factor`) or "yarn" (Peng et al., arXiv 2309.00071).
    theta: base of the geometric series of wavelengths.
    The other fields carry the names and meanings they have in Hugging Face configs.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class PolicyConfig:
    """Architecture of a policy; field names follow Hugging Face where they exist there."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_position_embeddings: int = 4096
    rope: RopeConfig = RopeConfig()
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise InputError(f"policy {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"policy num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "choose a number of key/value heads that divides it"
            )
        if self.head_dim % 2:
            raise InputError(f"policy head_dim is {self.head_dim}; rotary embeddings need an even number")

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises every query and key head before the rotation."""
        return self.family == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        """Qwen2 adds a bias to the query, key and value projections."""
        return self.family == "qwen2"
