"""pass@1 and pass@k of a policy on held-out problems, sampled with exact speculative decoding.

Works on any folder that train_grpo leaves and on any Hugging Face folder of a
supported family: `--policy runs/demo/policy --drafter runs/demo/drafter --task
arithmetic --samples 8 --k 1,4,8`. pass@k is the unbiased estimate from all samples of a
problem (Chen et al., arXiv 2107.03374); its 95% interval is the normal
approximation over problems. With --temperature 0 decoding is greedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

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
from specrl_jax.errors import InputError
from specrl_jax.rl.pass_at_k import mean_ci95, pass_at_k
from specrl_jax.rl.rewards import RIGHT
from specrl_jax.training.metrics import write_json

SCRIPT = "evaluate"


@dataclass(frozen=True)
class Config:
    """Options of an evaluation."""

    run: Run = RunOptions()
    model: ModelFlags = ModelOptions()
    problem: ProblemFlags = ProblemOptions()
    reward: str | None = None
    """MODULE:FUNCTION of your own reward(response, example) -> float; 1 and above is right."""
    sampling: SamplingFlags = SamplingOptions()
    k: str = "1"
    """Values of k, as in 1,4,8; none above --samples."""

    def __post_init__(self) -> None:
        if self.reward and self.problem.task == "arithmetic":
            raise InputError("--reward belongs to --task jsonl; arithmetic judges its own problems")
        if self.sampling.law.temperature == 0 and self.sampling.samples > 1:
            raise InputError(
                f"--samples is {self.sampling.samples} at --temperature 0, where all samples are the same; "
                "use --samples 1 or a temperature above 0"
            )
        check_drafts(self.model, self.sampling)
        _ = self.ks

    @property
    def mesh(self) -> str:
        """Devices asked for."""
        return self.model.mesh

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k in ascending order, 1 among them."""
        ks = {1}
        for text in self.k.split(","):
            if not (text.strip().isascii() and text.strip().isdigit()):
                raise InputError(f'--k is "{self.k}"; give whole numbers with commas between them, as in 1,4,8')
            ks.add(int(text))
        outside = [k for k in ks if not 1 <= k <= self.sampling.samples]
        if outside:
            raise InputError(f"--k asks for pass@{outside[0]}; choose k from 1 to {self.sampling.samples} (--samples)")
        return tuple(sorted(ks))


SMOKE = {
    "problem": {"task": "arithmetic", "problems": 8},
    "sampling": {"samples": 4, "max_new_tokens": 24},
    "k": "1,4",
}
PRESETS: dict[str, Mapping[str, Any]] = {"default": {}, "smoke": SMOKE}


def pass_rates(rewards: Float[np.ndarray, "p n"], ks: tuple[int, ...]) -> list[dict[str, Any]]:
    """pass@k with its 95% half-width, a row per k, from the rewards of `n` responses to each of `p` problems."""
    problems, samples = rewards.shape
    right = np.sum(rewards >= RIGHT, axis=1)
    rows = []
    for k in ks:
        mean, half_width = mean_ci95(pass_at_k(samples, right, k))
        rows.append({"k": k, "pass_at_k": mean, "ci95": half_width, "problems": problems, "samples": samples})
    return rows


def main(config: Config) -> None:
    """Check everything, sample, judge, write and print."""
    check_run(config.run, SCRIPT, config.model, config.problem)
    model = open_model(config.model, config.run, config.problem.problems)
    engine = model.engine(config.sampling)
    workload = open_problems(config.problem, model.tokenizer, config.reward, judged=True)
    engine.check_prompt_width(workload.prompt_width)
    out = open_output(config.run, config, SCRIPT)
    prompts, problems = workload.held_out(config.problem.split, config.problem.problems)
    model = model.initialised(config.run.seed)
    sampled = sample(model, engine, prompts, config.run.seed, config.sampling.batch)
    rewards = workload.rewards(problems, sampled.trajectory).reshape(-1, config.sampling.samples)
    described = figures(model, engine, sampled)
    rows = pass_rates(rewards, config.ks)
    summary = {
        "accuracy": rows[0]["pass_at_k"],
        "accuracy_ci95": rows[0]["ci95"],
        "reward_mean": float(np.mean(rewards)),
        **{f"pass_at_{row['k']}": row["pass_at_k"] for row in rows},
        **{f"pass_at_{row['k']}_ci95": row["ci95"] for row in rows},
        **described,
    }
    source = {"interval": "mean +- ci95, normal approximation over problems"} | provenance(config.run.seed)
    title = f"pass@k on {config.problem.data or config.problem.task} ({config.problem.split})"
    write_results(out, [row | described for row in rows], title, source)
    right = np.sum(rewards >= RIGHT, axis=1).tolist()
    row_ids = np.asarray(prompts.row_ids).tolist()
    write_json(out / "summary.json", summary | {"row_ids": row_ids, "right_per_problem": right} | source)
    print(markdown_table(rows))
    print(markdown_table([{"figure": name, "value": value} for name, value in described.items()]))
    print(f"pass@k: {source['interval']}", flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
