"""What becomes of a draft head while the policy learns.

The same GRPO run, several times for every seed: policy, head, prompts and noise are the same, and so are the tokens and
the policy after every step; only what becomes of the head differs: it stays as it is, is trained at every step, drafts
with a moving average of what is trained, or is trained only while it accepts less than it did (`updates`: share of the
steps). `acceptance_length` is the mean over the last quarter of the steps, `start` that of the first step, `worst` the
least of any step; `kl` is how far the policy has gone from where it began, in nats per token (the k3 estimate of the
last step, from a penalty too small to matter). Means over seeds with 95% intervals. NVIDIA's runs (arXiv 2604.26779)
compare a frozen in-domain head, 3.32 tokens a round, with one trained online, 3.29, and a frozen head that learned from
chat, 2.88, with one trained online, 3.04. `--other-drafter` does so too: the arms stand once for each head, and
`gap_closed` is the share of the lead of `--drafter` over the other, both frozen, that the other makes up online.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import train_grpo, train_options
from experiments.common import check_least, run_main
from experiments.draft_init import IN_DOMAIN, OTHER, PAPER
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.rollout_options import SpeculationFlags, SpeculationOptions
from experiments.seeds import grouped, mean_over_seeds, over_seeds
from experiments.train_options import Config as GrpoConfig
from experiments.train_options import DraftHead, grpo_arm
from specrl_jax.drafters.small_policy import SmallPolicyDrafter
from specrl_jax.errors import InputError
from specrl_jax.training.acceptance_plots import draw_adaptation
from specrl_jax.training.metrics import read_metrics, write_json

SCRIPT = "online_adaptation"
FROZEN, ONLINE = "frozen", "online"
_WATCHED = 1e-6  # weight of the KL penalty, which the reports of KL come with


@dataclass(frozen=True)
class Config(GrpoConfig):
    """Options of the table: those of a GRPO run, and what is compared."""

    seeds: int = 3
    speculation: SpeculationFlags = SpeculationOptions(draft_length=3)
    other_drafter: str | None = None
    """A second head of the same policy, which learned from something else."""
    averages: tuple[float, ...] = (0.9,)
    """What moving averages keep of themselves at every update."""
    tolerances: tuple[float, ...] = (0.02,)
    """Losses of acceptance, as shares of the best, above which a head that is trained only then is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("", self, seeds=1)
        for name in ("averages", "tolerances"):
            if not all(0.0 < share < 1.0 for share in getattr(self, name)):
                raise InputError(f"--{name} is {getattr(self, name)}; choose shares between 0 and 1")
        chosen = self.draft.average or self.draft.tolerance or not self.draft.online
        if not self.trains_head or self.compare or chosen:
            raise InputError("--drafts, --compare and what is trained online are chosen by the table; leave them out")
        if self.other_drafter is not None and self.drafter is None:
            raise InputError("--other-drafter stands beside --drafter; give that too")

    @property
    def heads(self) -> dict[str, str | None]:
        """Heads that every run begins with, by name; None is made by the first."""
        heads = {"given" if self.drafter else "own": self.drafter}
        return heads | ({OTHER: self.other_drafter} if self.other_drafter else {})

    @property
    def arms(self) -> dict[str, DraftHead]:
        """Training of the head, by name."""
        arms = {FROZEN: replace(self.draft, online=False), ONLINE: self.draft}
        arms |= {f"{ONLINE}, average {kept:g}": replace(self.draft, average=kept) for kept in self.averages}
        return arms | {f"{ONLINE}, below {1 - t:g} of best": replace(self.draft, tolerance=t) for t in self.tolerances}


# At ten times this rate of the head one step of Adam undoes what it had learned.
CPU = {
    "warmup": {"steps": 600, "stop_loss": 0.2},
    "draft": {"prompts": 1024, "steps": 120, "online_optimizer": {"learning_rate": 0.0002}},
    "steps": 16,
    "scan_steps": 4,
    "prompts": 16,
    "eval_every": 0,
    "eval_problems": 64,
    "max_new_tokens": 160,
}
PRESETS: dict[str, Mapping[str, Any]] = {
    "cpu": CPU,
    "gpu": {"steps": 200, "eval_every": 0, "draft": {"online_optimizer": {"learning_rate": 0.0001}}},
    "smoke": {**train_options.PRESETS["smoke"], "compare": False, "averages": (), "tolerances": (), "seeds": 1},
}


def run_of(config: Config, seed: int, folder: Path, **changes: Any) -> GrpoConfig:
    """One GRPO run."""
    loss = replace(config.loss, kl_coef=config.loss.kl_coef or _WATCHED)
    return grpo_arm(config, seed, folder, **({"loss": loss} | changes))


def measure(config: Config, seed: int, out: Path) -> list[dict[str, Any]]:
    """A row per step, head and arm. The first makes what is not given, and all begin with it."""
    begin: dict[str, Any] = {}
    rows = []
    for (head, drafter), (name, draft) in itertools.product(config.heads.items(), config.arms.items()):
        label = name if head != OTHER else f"{OTHER}, {name}"
        folder = out / "arms" / f"{re.sub('[^a-z0-9.]+', '_', label)}_{seed}"
        begin = begin | ({"drafter": drafter} if drafter else {})
        train_grpo.main(run_of(config, seed, folder, draft=draft, **begin))
        if config.drafter is None:
            first = out / "arms" / f"{FROZEN}_{seed}"
            begin = {"policy": config.policy or str(first / "warmup"), "drafter": str(first / "drafter")}
        for row in read_metrics(folder):
            if "acceptance_length" in row:
                names = ("draft_length", "acceptance_length", "kl", "reward_mean", "entropy", "draft_updated")
                figures = {key: row.get(key) for key in names}
                rows.append({"head": head, "arm": name, "seed": seed, "step": row["step"]} | figures)
    return rows


def paper_lengths(head: str, arm: str) -> tuple[float | None, float | None]:
    """NVIDIA's acceptance lengths of RL-Zero and RL-Think; None where there are none."""
    init, mode = OTHER if head == OTHER else IN_DOMAIN, {FROZEN: "offline", ONLINE: "adapted"}.get(arm, arm)
    return PAPER.get((init, mode), (None, None))


def late_of(run: list[dict[str, Any]], steps: int) -> float:
    """Acceptance length of the last quarter of a run's steps."""
    return float(np.mean([row["acceptance_length"] for row in run[steps - max(1, steps // 4) :]]))


def gap_closed(found: list[dict[str, Any]], steps: int) -> tuple[float, float] | None:
    """Share of the lead of the one head over the other, both frozen, that the other makes up; None without a lead.

    Mean over seeds, and half of its 95% interval.
    """
    late = {key: late_of(run, steps) for key, run in grouped(found, "seed", "head", "arm").items()}
    shares = []
    for seed in dict.fromkeys(row["seed"] for row in found):
        if (seed, OTHER, FROZEN) not in late:
            return None
        begun = late[seed, OTHER, FROZEN]
        lead = late[seed, "given", FROZEN] - begun
        if lead <= 0.0:
            return None
        shares.append((late[seed, OTHER, ONLINE] - begun) / lead)
    return mean_over_seeds(shares)


def summed_up(config: Config, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds."""
    table = []
    for (head, name), own in grouped(found, "head", "arm").items():
        runs = list(grouped(own, "seed").values())
        lengths = [[row["acceptance_length"] for row in run] for run in runs]
        row: dict[str, Any] = {"head": head, "arm": name, "steps": config.steps, "draft_length": own[0]["draft_length"]}
        for label, values in (
            ("start", [one[0] for one in lengths]),
            ("worst", [min(one) for one in lengths]),
            ("acceptance_length", [late_of(run, config.steps) for run in runs]),
        ):
            row[label], row[f"{label}_ci95"] = mean_over_seeds(values)
        trained = [1.0 if row["draft_updated"] is None else row["draft_updated"] for run in runs for row in run]
        row["updates"] = 0.0 if name == FROZEN else float(np.mean(trained))
        kl, half = mean_over_seeds([run[-1]["kl"] for run in runs])
        row |= {"kl": kl, "kl_ci95": half, "reward_before": float(np.mean([run[0]["reward_mean"] for run in runs]))}
        row |= dict(zip(("paper_rl_zero", "paper_rl_think"), paper_lengths(head, name), strict=True))
        row |= {"reward_after": float(np.mean([run[-1]["reward_mean"] for run in runs])), "seeds": len(runs)}
        table.append(row)
    return table


def main(config: Config) -> None:
    """Run every arm of every seed, write and print."""
    config.check()
    check_output(config.run, SCRIPT, other_drafter=config.other_drafter, **config.inputs)
    for drafter in config.heads.values():  # refuses what cannot be run
        session = train_grpo.open_session(run_of(config, config.run.seed, config.run.out / "none", drafter=drafter))[0]
        if isinstance(session.drafter, SmallPolicyDrafter):
            raise InputError(f"{drafter} is a policy, which is not trained while it drafts; give a draft head")
    out = open_output(config.run, config, SCRIPT)
    found = over_seeds(
        config.run.seed,
        config.seeds,
        lambda seed: measure(config, seed, out),
        lambda rows: f"{rows[-1]['arm']} accepts {rows[-1]['acceptance_length']:.2f} tokens a round",
    )
    table, source = summed_up(config, found), provenance(config.run.seed) | {"policy": config.policy or "from nothing"}
    write_results(out, table, "Online adaptation", source)
    closed = gap_closed(found, config.steps)
    share = None if closed is None else {"mean": closed[0], "ci95": closed[1]}
    write_json(out / "summary.json", {"gap_closed": share, "by_step": found} | source)
    labelled = [row | {"arm": f"{row['head']} head, {row['arm']}"} for row in found]
    draw_adaptation(labelled).savefig(out / "online_adaptation.png", dpi=120)
    print(markdown_table(table), flush=True)
    if closed is not None:
        print(f"online training closes {closed[0]:.2f} ± {closed[1]:.2f} of the gap", flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
