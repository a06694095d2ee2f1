"""Peer: the vanilla sampler of tunix, one compiled loop per shape and temperature.

A row that has its tokens goes on until the longest one has, and its time counts.
"""

import time
from typing import Any

from experiments.peers.protocol import generated, loaded, seconds_of, serve, spread
from experiments.peers.tunix_model import NEVER, IdTokenizer, load_qwen3


class Tunix:
    """A loaded policy and its samplers, one per cache size."""

    def load(self, policy: str, mode: str = "plain", **_: Any) -> dict[str, Any]:
        """Load a folder."""
        if mode != "plain":
            raise ValueError(f"mode {mode!r}: this peer has plain only")
        self.model = load_qwen3(policy)
        self.samplers: dict[int, Any] = {}
        self.warm: set[tuple[Any, ...]] = set()
        return loaded("google-tunix", "jax", "jaxlib", "flax")

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int | list[int],
        temperature: float = 1.0,
        seed: int = 0,
        ignore_eos: bool = True,
        end_ids: tuple[int, ...] = (),
        log_probs: bool = True,
    ) -> dict[str, Any]:
        """Generate; the first call of a program runs twice and the second run counts."""
        counts = spread(max_new_tokens, len(prompts))
        width, longest = max(map(len, prompts)), max(counts)
        sampler = self._sampler(width + longest)
        options: dict[str, Any] = {"temperature": temperature, "top_p": 1.0} if temperature > 0 else {}
        texts = [" ".join(map(str, prompt)) for prompt in prompts]

        def run() -> Any:
            return sampler(
                texts,
                max_generation_steps=longest,
                max_prompt_length=width,
                return_logprobs=log_probs,
                eos_tokens=[NEVER] if ignore_eos else list(end_ids),
                seed=seed,
                **options,
            )

        program = (len(prompts), width, longest, temperature, ignore_eos, tuple(end_ids), log_probs)
        if program not in self.warm:
            run()
            self.warm.add(program)
        start = time.perf_counter()
        out = run()
        seconds = time.perf_counter() - start
        tokens = [row[:count].tolist() for row, count in zip(out.tokens, counts, strict=True)]
        kept = None
        if log_probs:
            kept = [row[: len(own)] for row, own in zip(out.logprobs, tokens, strict=True)]
        return generated(seconds, tokens, kept)

    def _sampler(self, slots: int) -> Any:
        from tunix.generate.sampler import CacheConfig, Sampler

        if slots not in self.samplers:
            config = self.model.config
            cache = CacheConfig(slots, config.num_layers, config.num_kv_heads, config.head_dim)
            self.samplers[slots] = Sampler(self.model, IdTokenizer(), cache)
        return self.samplers[slots]


def matmul(shapes: list[tuple[int, int, int]], repeats: int = 20) -> dict[str, Any]:
    """Time of bare products in one compiled program, each after the one before it; kernels `[d_in, d_out]`."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(0)
    inputs = [jax.random.normal(key, (rows, d_in), jnp.float32) for rows, d_in, _ in shapes]
    kernels = [jax.random.normal(key, (d_in, d_out), jnp.float32) for _, d_in, d_out in shapes]

    @jax.jit
    def one_pass(inputs: list[Any], kernels: list[Any]) -> list[Any]:
        outputs: list[Any] = []
        for x, kernel in zip(inputs, kernels, strict=True):
            # Independent products would run side by side, as no decode step can.
            after = jax.lax.optimization_barrier((x, outputs[-1]))[0] if outputs else x
            outputs.append(after @ kernel)
        return outputs

    return seconds_of(lambda: jax.block_until_ready(one_pass(inputs, kernels)), repeats) | {"packed": False}


if __name__ == "__main__":
    engine = Tunix()
    serve({"load": engine.load, "generate": engine.generate, "matmul": matmul})
