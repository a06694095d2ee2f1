"""Our rollouts beside those of other engines, on the same Hugging Face folder and CPU.

Every peer runs in an environment and a process of its own (`experiments/peers/`) and times its own call. All arms
are called in turn with the same prompts; responses have one length, end tokens are ignored, temperature 1, and
log-probabilities of the sampled tokens are computed where the engine can. `speedup` is the peer's seconds over
ours, the median of paired ratios with its 95% interval: above 1 we are faster. `products_ms` is the bare time of
the policy's matrix products of one step in that engine's library.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.bare_products import bare_policy
from experiments.bench_models import (
    PAUSE_S,
    ShapeOptions,
    drafter_of,
    in_turn,
    open_expanded,
    parts_of,
    ratio,
    save_pair,
)
from experiments.common import Run, RunOptions, check_least, run_main
from experiments.expand import Pair
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.peers.client import Peer, check_environments
from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.noise import sequence_keys
from specrl_jax.rollout.rules import Match, Ratio
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.metrics import write_json
from specrl_jax.training.speculation import speculation_metrics

SCRIPT = "bench_peers"
Name = Literal["transformers", "vllm", "vllm-ngram", "vllm-eagle3", "tunix"]


@dataclass(frozen=True)
class Config:
    """Options of the comparison."""

    run: Run = RunOptions()
    model: Annotated[ShapeOptions, tyro.conf.arg(name="")] = field(default_factory=lambda: ShapeOptions(shape="25m"))
    environments: str | None = None
    """Folder of the peers' virtual environments (experiments/peers/README.md); without one only we run."""
    peers: tuple[Name, ...] = ("transformers", "vllm", "tunix")
    rows: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 32
    tokens: int = 128
    draft_lengths: tuple[int, ...] = (0,)
    """Our arms."""
    rule: Literal["match", "ratio"] = "match"
    """Our verification rule; ratio is what vLLM does."""
    invariant: bool = False
    """Add our invariant numerics as another arm."""
    repeats: int = 15

    def __post_init__(self) -> None:
        check_least("", self, prompt_tokens=2, tokens=1, repeats=3)
        if min(self.rows, default=0) < 1 or not self.draft_lengths:
            raise InputError("--rows and --draft-lengths must name at least one number, rows at least 1")
        if min(self.draft_lengths) < 0:
            raise InputError(f"--draft-lengths is {self.draft_lengths}; numbers must be at least 0")

    @property
    def mesh(self) -> str:
        """One device."""
        return "data=1"


PRESETS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "smoke": {"rows": (2,), "prompt_tokens": 8, "tokens": 8, "draft_lengths": (0, 2), "repeats": 3},
}


@dataclass
class Ours:
    """An arm of our engine."""

    call: Callable[[], Any]
    last: Any = None

    def __call__(self) -> float:
        """Seconds of one rollout."""
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        self.last = jax.block_until_ready(self.call())
        return time.perf_counter() - start


@dataclass
class Theirs:
    """An arm of a peer."""

    peer: Peer
    question: dict[str, Any]
    last: dict[str, Any] | None = None

    def __call__(self) -> float:
        """Seconds of one rollout, by the peer's clock."""
        time.sleep(PAUSE_S)
        self.last = self.peer.request("generate", **self.question)
        assert all(len(tokens) >= self.question["max_new_tokens"] - 1 for tokens in self.last["tokens"])
        return float(self.last["seconds"])


def our_arm(pair: Pair, config: Config, tokens: np.ndarray, k: int, numerics: Numerics) -> Ours:
    """A fixed draft length of our engine."""
    law = SamplingLaw(end_ids=(1,), min_new_tokens=config.tokens)
    rule = Ratio() if config.rule == "ratio" and k else Match()
    rollout = RolloutConfig(config.tokens, 1, k, law, rule, ladder=(1.0,))
    engine = RolloutEngine(pair.policy, rollout, numerics, drafter_of(pair) if k else None)
    rows = len(tokens)
    lengths = jnp.full((rows,), tokens.shape[1], jnp.int32)
    prompts = Prompts(jnp.asarray(tokens), lengths, jnp.arange(rows, dtype=jnp.uint32))
    keys = sequence_keys(config.run.seed, "evaluation", 0, prompts.row_ids, jnp.zeros((rows,), jnp.int32))
    program, draft = jax.jit(engine.rollout), pair.draft if k else None
    return Ours(lambda: program(pair.params, draft, prompts, keys))


def open_peer(name: Name, config: Config, folder: Path, stack: ExitStack) -> Peer:
    """A peer that has loaded the folder."""
    assert config.environments is not None
    program, _, mode = name.partition("-")
    peer = stack.enter_context(Peer(program, config.environments, log=folder / f"{name}.log"))
    fields: dict[str, Any] = {"policy": str(folder / "policy")}
    if program == "vllm":
        fields |= {"mode": mode or "plain", "k": 3, "max_rows": max(config.rows)}
        fields |= {"max_model_len": config.prompt_tokens + config.tokens + 16}
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
    x = jnp.ones((rows, pair.policy.hidden_size))
    program = jax.jit(bare_policy)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(program(pair.params, x))
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times[5:]))


def measure(pair: Pair, config: Config, rows: int, peers: Mapping[str, Peer]) -> list[dict[str, Any]]:
    """A row of the table per arm."""
    rng = np.random.default_rng(config.run.seed)
    tokens = rng.integers(2, min(pair.policy.vocab_size, 16_000), (rows, config.prompt_tokens)).astype(np.int32)
    arms: dict[str, Any] = {
        f"ours, {k} drafts": our_arm(pair, config, tokens, k, Numerics()) for k in config.draft_lengths
    }
    if config.invariant:
        arms["ours, invariant"] = our_arm(pair, config, tokens, config.draft_lengths[0], Numerics("invariant", 8, 8))
    question = {
        "prompts": tokens.tolist(),
        "max_new_tokens": config.tokens,
        "temperature": 1.0,
        "seed": config.run.seed,
    }
    arms |= {name: Theirs(peer, question) for name, peer in peers.items()}
    seconds = in_turn(arms, config.repeats)
    first = next(iter(arms))
    table = []
    for name, arm in arms.items():
        middle, low, high = ratio(seconds[name], seconds[first])
        row: dict[str, Any] = {
            "arm": name,
            "rows": rows,
            "prompt_tokens": config.prompt_tokens,
            "new_tokens": config.tokens,
            "seconds": float(np.median(seconds[name])),
            "tokens_per_second": rows * config.tokens / float(np.median(seconds[name])),
            "speedup": middle,
            "speedup_low": low,
            "speedup_high": high,
        }
        if isinstance(arm, Theirs):
            assert arm.last is not None
            row["acceptance_length"] = arm.last.get("acceptance_length")
            row["log_probs"] = bool(arm.last.get("log_probs_computed"))
            products = arm.peer.request("matmul", shapes=chain_shapes(pair, rows), repeats=10)
            row["products_ms"] = 1e3 * products["seconds"] if "seconds" in products else None
        else:
            row["acceptance_length"] = speculation_metrics(jax.device_get(arm.last.stats)).get("acceptance_length")
            row["log_probs"] = True
            row["products_ms"] = our_products(pair, rows)
        table.append(row)
    return table


def main(config: Config) -> None:
    """Save the expanded pair, start the peers, measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter)
    names = config.peers if config.environments is not None else ()
    check_environments(config.environments, [name.partition("-")[0] for name in names])
    out = open_output(config.run, config, SCRIPT)
    pair = open_expanded(config.model, config.run.seed)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        save_pair(pair, config.model, folder)
        peers: dict[str, Peer] = {name: open_peer(name, config, folder, stack) for name in names}
        table = [row for rows in config.rows for row in measure(pair, config, rows, peers)]
    source = provenance(config.run.seed) | parts_of(pair, config.model)
    write_results(out, table, "Rollouts of several engines", source)
    write_json(out / "summary.json", {"arms": len(table)} | source)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
