"""Our rollouts beside those of other engines, on the same Hugging Face folder and CPU.

Every peer runs in an environment and a process of its own (`experiments/peers/`) and times its own call. All arms
are called in turn with the same prompts and temperature; responses have one length and end tokens are ignored, or, with
`--task`, end as they end. Log-probabilities of the sampled tokens are computed where the engine can. `speedup` is the
arm's seconds per response token over those of our fastest arm, the median of paired ratios with its 95% interval: above
1 ours is faster; which arm of ours that is, the same runs say. `products_ms` is the bare time of
the policy's matrix products of one step in that engine's library.
"""

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

from experiments.bare_products import bare_calls
from experiments.bench_models import PAUSE_S, OneDevice, ShapeOptions, open_expanded, parts_of, save_pair
from experiments.bench_work import Work, WorkFlags, WorkOptions, make_work, noise_keys
from experiments.common import Run, RunOptions, check_least, run_main
from experiments.expand import Pair
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.peers.client import Peer, check_environments
from experiments.rollout_options import Drafts, drafter_for
from experiments.turns import in_turn, ratio_columns
from specrl_jax.drafters.combined import params_for
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.rollout.config import MOST_BESIDE, RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match, Ratio
from specrl_jax.training.costs import costs_at
from specrl_jax.training.metrics import write_json
from specrl_jax.training.speculation import speculation_metrics

SCRIPT = "bench_peers"
Name = Literal["transformers", "vllm", "vllm-ngram", "vllm-eagle3", "tunix"]


@dataclass(frozen=True)
class Config(OneDevice):
    """Options of the comparison."""

    run: Run = RunOptions()
    model: Annotated[ShapeOptions, tyro.conf.arg(name="")] = field(default_factory=lambda: ShapeOptions(shape="25m"))
    environments: str | None = None
    """Folder of the peers' virtual environments (experiments/peers/README.md); without one only we run."""
    peers: tuple[Name, ...] = ("transformers", "vllm", "tunix")
    rows: tuple[int, ...] = (1, 8)
    work: WorkFlags = field(default_factory=WorkOptions)
    draft_lengths: tuple[int, ...] = (0,)
    """Our arms."""
    adaptive: int = 0
    """Add arms in which the controller chooses the drafts, at most so many of a row; 0 for none."""
    adaptive_drafts: tuple[Drafts, ...] = ("head",)
    """Where the drafts of these arms come from, one arm for each."""
    adaptive_branches: int = 1
    """Above 1, add an arm of the controller with the head's drafts and so many candidates at each depth."""
    rule: Literal["match", "ratio"] = "match"
    """Our verification rule at fixed draft lengths; ratio is what vLLM does. The controller goes with match."""
    invariant: bool = False
    """Add our invariant numerics as another arm."""
    repeats: int = 15

    def __post_init__(self) -> None:
        check_least("", self, repeats=3, adaptive=0, adaptive_branches=1)
        if self.work.task is not None and self.model.policy is None:
            raise InputError(f"--task {self.work.task} needs the --policy that was trained for it; give both")
        if self.work.task is not None and self.environments is not None and "tunix" in self.peers:
            raise InputError("--peers names tunix, which does not count end tokens; leave it out under --task")
        if self.adaptive_branches > 1 and not 1 <= self.adaptive <= MOST_BESIDE // self.adaptive_branches:
            raise InputError(
                f"--adaptive-branches {self.adaptive_branches} with --adaptive {self.adaptive}; choose --adaptive 1 to "
                f"{MOST_BESIDE // self.adaptive_branches}"
            )
        if min(self.rows, default=0) < 1 or not self.draft_lengths:
            raise InputError("--rows and --draft-lengths must name at least one number, rows at least 1")
        if "suffix" in self.adaptive_drafts:
            raise InputError("--adaptive-drafts names suffix, but prompts have one response each; name ngram")
        if min(self.draft_lengths) < 0:
            raise InputError(f"--draft-lengths is {self.draft_lengths}; numbers must be at least 0")


PRESETS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "smoke": {
        "model": {"shape": "toy"},
        "rows": (2,),
        "work": {"prompt_tokens": 8, "tokens": 8},
        "draft_lengths": (0, 2),
        "adaptive": 3,
        "adaptive_branches": 2,
        "repeats": 3,
    },
}


class Ours:
    """An arm of our engine; every call has other noise."""

    def __init__(
        self,
        pair: Pair,
        config: Config,
        work: Work,
        k: int,
        numerics: Numerics,
        adaptive: Drafts | None = None,
        branches: int = 1,
    ) -> None:
        rule = Ratio() if config.rule == "ratio" and k and adaptive is None else Match(branches=branches)
        # Where responses end as they end, the live rows move into smaller batches, as they do in the other engines.
        ladder = (1.0, 0.5, 0.25, 0.125) if work.end_ids else (1.0,)
        rollout = RolloutConfig(
            work.longest, 1, k, work.law, rule, adaptive=adaptive is not None, ladder=ladder, smallest_rung=1
        )
        drafter = drafter_for(adaptive or "head", pair.drafter) if k else None
        engine = RolloutEngine(pair.policy, rollout, numerics, drafter)
        self._program, self._draft = jax.jit(engine.rollout), params_for(drafter, pair.draft) if k else None
        self._params, self._prompts, self._calls = pair.params, work.prompts, 0
        rows, width = work.prompts.tokens.shape
        context = width + work.longest // 2
        self._control = costs_at(None, engine, pair.params, self._draft, rows, context) if adaptive else None
        self.last: Any = None

    def __call__(self) -> float:
        """Seconds per response token; the controller begins with what the rollout before taught it, as in training."""
        time.sleep(PAUSE_S)
        keys = noise_keys(self._prompts, seed=self._calls)
        self._calls += 1
        start = time.perf_counter()
        self.last = self._program(self._params, self._draft, self._prompts, keys, None, self._control)
        jax.block_until_ready(self.last)
        seconds = time.perf_counter() - start
        self._control = self.last.control
        return seconds / int(self.last.lengths.sum())

    @property
    def figures(self) -> dict[str, Any]:
        """Acceptance of the newest rollout."""
        length = speculation_metrics(jax.device_get(self.last.stats)).get("acceptance_length")
        return {"acceptance_length": length, "log_probs": True}


class Theirs:
    """An arm of a peer; every call has another seed."""

    def __init__(self, peer: Peer, work: Work) -> None:
        self.peer = peer
        tokens, lengths = np.asarray(work.prompts.tokens), np.asarray(work.prompts.lengths)
        self._question: dict[str, Any] = {
            "prompts": [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)],
            "max_new_tokens": work.longest,
            "temperature": work.temperature,
            "ignore_eos": not work.end_ids,
            "end_ids": work.end_ids,
        }
        self._forced, self._calls = not work.end_ids, 0
        self.last: dict[str, Any] = {}

    def __call__(self) -> float:
        """Seconds per response token, by the peer's clock."""
        time.sleep(PAUSE_S)
        self.last = self.peer.request("generate", **self._question, seed=self._calls)
        self._calls += 1
        lengths = [len(tokens) for tokens in self.last["tokens"]]
        assert not self._forced or min(lengths) >= self._question["max_new_tokens"] - 1
        return float(self.last["seconds"]) / sum(lengths)

    @property
    def figures(self) -> dict[str, Any]:
        """Acceptance of the newest rollout, and whether it had log-probs."""
        computed = bool(self.last.get("log_probs_computed"))
        return {"acceptance_length": self.last.get("acceptance_length"), "log_probs": computed}


def open_peer(name: Name, config: Config, max_model_len: int, folder: Path, stack: ExitStack) -> Peer:
    """A peer that has loaded the folder."""
    assert config.environments is not None
    program, _, mode = name.partition("-")
    peer = stack.enter_context(Peer(program, config.environments, log=folder / f"{name}.log"))
    fields: dict[str, Any] = {"policy": str(folder / "policy")}
    if program == "vllm":
        fields |= {"mode": mode or "plain", "k": 3, "max_rows": max(config.rows)}
        fields |= {"max_model_len": max_model_len}
        fields |= {"drafter": str(folder / "drafter")} if mode == "eagle3" else {}
    peer.request("load", **fields)
    return peer


_KERNELS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def chain_shapes(pair: Pair, rows: int) -> list[tuple[int, ...]]:
    """The matrix products of one step: rows, inputs, outputs."""
    layers = [(rows, *getattr(layer, name).shape[::-1]) for layer in pair.params.layers for name in _KERNELS]
    return [*layers, (rows, pair.policy.hidden_size, pair.policy.vocab_size)]


def our_products(pair: Pair, rows: int) -> float:
    """Milliseconds of the bare products here."""
    policy, _ = bare_calls(pair, rows)
    return 1e3 * float(np.median(in_turn({"products": policy}, 15, discard=5)["products"]))


def measure(pair: Pair, config: Config, work: Work, peers: Mapping[str, Peer]) -> list[dict[str, Any]]:
    """A row of the table per arm."""
    rows = len(work.limits)
    arms: dict[str, Any] = {f"ours, {k} drafts": Ours(pair, config, work, k, Numerics()) for k in config.draft_lengths}
    if config.adaptive:
        for drafts in config.adaptive_drafts:
            name = f"ours, up to {config.adaptive} drafts, {drafts}"
            arms[name] = Ours(pair, config, work, config.adaptive, Numerics(), adaptive=drafts)
        if config.adaptive_branches > 1:
            name = f"ours, up to {config.adaptive} drafts, head, {config.adaptive_branches} branches"
            arms[name] = Ours(
                pair, config, work, config.adaptive, Numerics(), adaptive="head", branches=config.adaptive_branches
            )
    if config.invariant:
        arms["ours, invariant"] = Ours(pair, config, work, config.draft_lengths[0], Numerics("invariant", 8, 8))
    arms |= {name: Theirs(peer, work) for name, peer in peers.items()}
    seconds, ours_ms = in_turn(arms, config.repeats), our_products(pair, rows)
    ours = [name for name, arm in arms.items() if isinstance(arm, Ours)]
    fastest = min(ours, key=lambda name: float(np.median(seconds[name])))
    table = []
    for name, arm in arms.items():
        row: dict[str, Any] = {
            "arm": name,
            "workload": config.work.task or "random",
            "branchy": config.work.branchy or None,
            "rows": rows,
            "temperature": work.temperature,
            "prompt_tokens": int(work.prompts.tokens.shape[1]),
            "new_tokens": "natural" if config.work.task else config.work.tokens,
            "tokens_per_second": 1.0 / float(np.median(seconds[name])),
        }
        row |= ratio_columns("speedup", seconds[name], seconds[fastest]) | arm.figures
        if isinstance(arm, Theirs):
            products = arm.peer.request("matmul", shapes=chain_shapes(pair, rows), repeats=10)
            row["products_ms"] = 1e3 * products["seconds"] if "seconds" in products else None
            row["peer_versions"] = arm.peer.versions
        else:
            row["products_ms"] = ours_ms
        table.append(row)
    return table


def main(config: Config) -> None:
    """Save the expanded pair, start the peers, measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter)
    names = config.peers if config.environments is not None else ()
    check_environments(config.environments, [name.partition("-")[0] for name in names], config.model.dtype)
    policy, vocab_size, seed = config.model.policy, config.model.target.vocab_size, config.run.seed
    works = {rows: make_work(config.work, rows, policy, vocab_size, "equal", seed) for rows in config.rows}
    pair = open_expanded(config.model, config.run.seed)
    out = open_output(config.run, config, SCRIPT)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        save_pair(pair, config.model, folder)
        longest = 16 + max(work.prompts.tokens.shape[1] + work.longest for work in works.values())
        peers: dict[str, Peer] = {name: open_peer(name, config, longest, folder, stack) for name in names}
        table = [row for work in works.values() for row in measure(pair, config, work, peers)]
    source = provenance(config.run.seed) | parts_of(pair, config.model)
    write_results(out, table, "Rollouts of several engines", source)
    write_json(out / "summary.json", {"arms": len(table)} | source)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
