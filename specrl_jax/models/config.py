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

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise InputError(f"rope theta is {self.theta}; it must exceed 1")
        if self.factor <= 0:
            raise InputError(f"rope factor is {self.factor}; it must be positive")
        if self.kind in ("llama3", "yarn") and (self.original_max_position_embeddings or 0) < 1:
            raise InputError(
                f"rope original_max_position_embeddings is {self.original_max_position_embeddings}; "
                f"kind {self.kind!r} needs the context length of the pretraining"
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise InputError(
                f"rope high_freq_factor is {self.high_freq_factor}; it must exceed low_freq_factor, "
                f"which is {self.low_freq_factor}"
            )
        if self.kind == "yarn" and min(self.beta_fast, self.beta_slow) <= 0:
            raise InputError(f"rope beta_fast, beta_slow are {self.beta_fast}, {self.beta_slow}; both must be positive")

    @property
    def original_context(self) -> int:
        """Context length of the pretraining; kinds "llama3" and "yarn" always have one."""
        assert self.original_max_position_embeddings is not None
        return self.original_max_position_embeddings


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
