"""Responses of a policy, sampled with exact speculative decoding.

Works on any Hugging Face folder or hub name of a supported family, with its own
tokenizer and chat template: `--policy runs/demo/policy --drafter runs/demo/drafter
--prompt "18+29="`. With a drafter the tokens are those that the policy alone gives;
they only come sooner. The responses go to OUT/results.json and results.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from experiments.common import Run, RunOptions, run_main
from experiments.inference import (
    ModelFlags,
    ModelOptions,
    ProblemFlags,
    ProblemOptions,
    SamplingFlags,
    SamplingOptions,
    check_drafts,
    check_run,
    figures,
    open_model,
    open_problems,
    sample,
)
from experiments.outputs import markdown_table, open_output, provenance, write_results
from specrl_jax.data.jsonl import encode_examples
from specrl_jax.data.layouts import Example
from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.training.metrics import write_json
from specrl_jax.training.workloads import decode

SCRIPT = "generate"


@dataclass(frozen=True)
class Config:
    """Options of a generation."""

    run: Run = RunOptions()
    model: ModelFlags = ModelOptions()
    prompt: tuple[str, ...] = ()
    """Prompts as text; the tokenizer's chat template is applied where it has one."""
    problem: ProblemFlags = ProblemOptions(problems=8)
    sampling: SamplingFlags = SamplingOptions()

    def __post_init__(self) -> None:
        if self.prompt and self.problem.task is not None:
            raise InputError("--prompt and --task contradict each other; give one of them")
        check_drafts(self.model, self.sampling)

    @property
    def mesh(self) -> str:
        """Devices asked for."""
        return self.model.mesh


SMOKE = {
    "problem": {"task": "arithmetic", "problems": 4},
    "sampling": {"samples": 2, "max_new_tokens": 24},
}
PRESETS: dict[str, Mapping[str, Any]] = {"default": {}, "smoke": SMOKE}


def encode_texts(texts: tuple[str, ...], tokenizer: PreTrainedTokenizerFast) -> Prompts:
    """Texts as prompts of a user; InputError when one of them is empty."""
    examples = [Example(i, text) for i, text in enumerate(texts)]
    encoded = encode_examples(examples, tokenizer, max_prompt_tokens=10**9)
    if encoded.dropped:
        raise InputError("--prompt is an empty text; write at least one character")
    return encoded.prompts


def rows_of(tokenizer: PreTrainedTokenizerFast, trajectory: Trajectory) -> list[dict[str, Any]]:
    """A flat object per response."""
    prompts = trajectory.prompts
    texts = [decode(tokenizer, t[:n]) for t, n in zip(prompts.tokens, prompts.lengths, strict=True)]
    samples = len(trajectory.lengths) // len(texts)
    return [
        {
            "row_id": int(prompts.row_ids[i // samples]),
            "sample": i % samples,
            "prompt": texts[i // samples],
            "response": decode(tokenizer, trajectory.tokens[i, :length], special=False),
            "tokens": int(length),
            "ended": bool(trajectory.ended[i]),
            "log_prob": float(np.sum(trajectory.log_probs[i, :length], dtype=np.float64)),
        }
        for i, length in enumerate(trajectory.lengths)
    ]


def main(config: Config) -> None:
    """Check everything, sample, write and print."""
    check_run(config.run, SCRIPT, config.model, config.problem)
    if not config.prompt and config.problem.task is None and config.model.policy is not None:
        raise InputError("there is nothing to respond to; give --prompt TEXT or --task arithmetic")
    model = open_model(config.model, config.run, len(config.prompt) or config.problem.problems)
    engine = model.engine(config.sampling)
    if config.prompt:
        prompts = encode_texts(config.prompt, model.tokenizer)
        engine.check_prompt_width(prompts.tokens.shape[1])
        out = open_output(config.run, config, SCRIPT)
    else:
        workload = open_problems(config.problem, model.tokenizer)
        engine.check_prompt_width(workload.prompt_width)
        out = open_output(config.run, config, SCRIPT)
        prompts, _ = workload.held_out(config.problem.split, config.problem.problems)
    model = model.initialised(config.run.seed)
    sampled = sample(model, engine, prompts, config.run.seed, config.sampling.batch)
    rows = rows_of(model.tokenizer, sampled.trajectory)
    for row in rows:
        print(f"--- prompt {row['row_id']}, sample {row['sample']}\n{row['prompt']}{row['response']}\n")
    summary = figures(model, engine, sampled)
    source = provenance(config.run.seed)
    write_results(out, rows, "Responses", source)
    write_json(out / "summary.json", summary | source)
    print(markdown_table([{"figure": name, "value": value} for name, value in summary.items()]), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
