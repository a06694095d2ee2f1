"""Peer: `generate` of transformers, eager, dynamic cache.

A row that has its tokens goes on until the longest one has: that is how this
engine works, and its time counts. Mode "ngram" is prompt lookup, one prompt per call.
"""

import time
from typing import Any

from experiments.peers.protocol import generated, loaded, serve, spread
from experiments.peers.torch_chain import chain_seconds


class Transformers:
    """A loaded policy and how it generates."""

    def load(self, policy: str, mode: str = "plain", k: int = 3, **_: Any) -> dict[str, Any]:
        """Load a folder; `k` is the number of tokens that prompt lookup proposes."""
        import torch
        from transformers import AutoModelForCausalLM

        if mode not in ("plain", "ngram"):
            raise ValueError(f"mode {mode!r} is not one of plain, ngram")
        self.model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, local_files_only=True).eval()
        self.lookup = k if mode == "ngram" else None
        self.warm: set[tuple[int, ...]] = set()
        return loaded("torch", "transformers", threads=torch.get_num_threads())

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
        """Generate; the first call of a shape runs twice and the second run counts."""
        import torch

        counts = spread(max_new_tokens, len(prompts))
        call = (prompts, counts, temperature, () if ignore_eos else tuple(end_ids), log_probs)
        shape = (len(prompts), max(map(len, prompts)), max(counts))
        if shape not in self.warm:
            self._run(*call)
            self.warm.add(shape)
        torch.manual_seed(seed)
        start = time.perf_counter()
        tokens, kept = self._run(*call)
        return generated(time.perf_counter() - start, tokens, kept)

    def _run(
        self, prompts: list[list[int]], counts: list[int], temperature: float, ends: tuple[int, ...], log_probs: bool
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options: dict[str, Any] = {"do_sample": temperature > 0, "pad_token_id": 0, "eos_token_id": list(ends) or None}
        if temperature > 0:
            # The model's generation_config.json may name others.
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if self.lookup is not None:
            options["prompt_lookup_num_tokens"] = self.lookup
        recorder = _recorder(width) if log_probs and self.lookup is None else None
        if recorder is not None:
            options["logits_processor"] = [recorder]
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(counts), **options)
        tokens = [_closed(row[:count], ends) for row, count in zip(out[:, width:].tolist(), counts, strict=True)]
        if recorder is None:
            return tokens, None
        rows = recorder.finish(out).tolist()
        return tokens, [row[: len(kept)] for row, kept in zip(rows, tokens, strict=True)]


def _closed(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """Tokens up to the first end token, which belongs to them."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def _recorder(width: int) -> Any:
    """Keeps the log-probability of every sampled token, before temperature.

    The logits of all steps would not fit; those of one step are read when the next one shows what was sampled.
    """
    import torch
    from transformers import LogitsProcessor

    class Recorder(LogitsProcessor):
        def __init__(self) -> None:
            self.log_probs: list[Any] = []
            self.scores: Any = None

        def _read(self, ids: Any) -> None:
            if self.scores is not None:
                chosen = self.scores.gather(1, ids[:, width + len(self.log_probs), None])[:, 0]
                self.log_probs.append(chosen - self.scores.logsumexp(1))

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self._read(input_ids)
            self.scores = scores
            return scores

        def finish(self, ids: Any) -> Any:
            self._read(ids)
            return torch.stack(self.log_probs, 1)

    return Recorder()


def matmul(shapes: list[tuple[int, int, int]], repeats: int = 20) -> dict[str, Any]:
    """Time of bare products, as the model's linear layers compute them."""
    return chain_seconds(shapes, repeats)


if __name__ == "__main__":
    engine = Transformers()
    serve({"load": engine.load, "generate": engine.generate, "matmul": matmul})
