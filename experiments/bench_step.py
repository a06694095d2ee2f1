"""A whole GRPO step beside those of other trainers, and what drafts save of it.

A step rolls out 4 prompts x 4 responses of equal length at temperature 1, rewards them and updates the policy once with
AdamW; every arm has the same passes over the responses: with `--kl-coefs 0` the update alone, above 0 one pass of the
reference before it, and in none an own pass for old log-probs (one update per rollout: its ratio is 1).
`speedup` is the median of paired ratios to our step without drafts, with its 95% interval: a peer's seconds over ours,
our seconds without drafts over those with. `amdahl` is what the measured share of the rollout in the step and the
measured speed-up of the rollout alone predict.
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
from jaxtyping import Array, Float, Int, UInt32

from experiments.bench_models import (
    PAUSE_S,
    OneDevice,
    ShapeOptions,
    SyntheticMatch,
    open_expanded,
    parts_of,
    save_pair,
)
from experiments.bench_work import endless_law
from experiments.common import Run, RunOptions, check_least, run_main
from experiments.expand import Pair
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.peers.client import Peer, check_environments
from experiments.peers.stepper import PROMPTS, SAMPLES
from experiments.turns import in_turn, ratio, ratio_columns, seconds_of
from specrl_jax.data.arithmetic import Split
from specrl_jax.data.prompts import Prompts
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.parallel.mesh import make_mesh, parse_mesh
from specrl_jax.rl.grpo import GrpoState, GrpoStep, UpdateConfig
from specrl_jax.rl.losses import LossConfig
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.control import Control
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match
from specrl_jax.training.costs import costs_at
from specrl_jax.training.metrics import write_json

SCRIPT = "bench_step"
_LEARNING_RATE = 1e-6

Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Config(OneDevice):
    """Options of the comparison."""

    run: Run = RunOptions()
    model: Annotated[ShapeOptions, tyro.conf.arg(name="")] = field(default_factory=lambda: ShapeOptions(shape="25m"))
    environments: str | None = None
    """Folder of the peers' virtual environments (experiments/peers/README.md); without one only we run."""
    peers: tuple[Literal["tunix-grpo", "trl-grpo"], ...] = ("tunix-grpo", "trl-grpo")
    prompt_tokens: int = 32
    tokens: int = 128
    """Of every response."""
    draft_lengths: tuple[int, ...] = (3,)
    """Our arms beside the one without drafts."""
    adaptive: int = 0
    """Largest draft length of another arm, whose controller chooses; 0 for none."""
    survival: float = 0.877
    """Synthetic acceptance of our arms with drafts; 0 for the real one."""
    kl_coefs: tuple[float, ...] = (0.0, 0.04)
    """Weights of the KL penalty; above 0 every arm makes a pass of the reference."""
    microbatch: int = 4
    """Our sequences per gradient accumulation step; theirs is all at once, their default."""
    repeats: int = 15

    def __post_init__(self) -> None:
        check_least("", self, prompt_tokens=2, tokens=1, microbatch=1, repeats=3, adaptive=0)
        if min(self.draft_lengths, default=1) < 1:
            raise InputError(f"--draft-lengths is {self.draft_lengths}; numbers must be at least 1")
        if min(self.kl_coefs, default=-1.0) < 0.0:
            raise InputError(f"--kl-coefs is {self.kl_coefs}; name at least one number, all of them at least 0")
        if not 0.0 <= self.survival < 1.0:
            raise InputError(f"--survival is {self.survival}; choose 0 (real acceptance) to below 1")
        if (PROMPTS * SAMPLES) % self.microbatch:
            raise InputError(f"--microbatch is {self.microbatch}; choose a divisor of {PROMPTS * SAMPLES}")


PRESETS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "smoke": {
        "model": {"shape": "toy"},
        "prompt_tokens": 4,
        "tokens": 4,
        "draft_lengths": (2,),
        "adaptive": 2,
        "kl_coefs": (0.0,),
        "repeats": 3,
    },
}


@dataclass(frozen=True, eq=False)
class RandomTask:
    """Prompts of random ids, and rewards that differ within a group and teach nothing."""

    prompt_tokens: int
    vocab_size: int
    seed: int

    def issue(self, split: Split, counters: UInt32[Array, "g"]) -> tuple[Prompts, UInt32[Array, "g"]]:
        """Prompts by number."""
        draw = lambda number: jax.random.randint(  # noqa: E731
            jax.random.fold_in(jax.random.key(self.seed), number), (self.prompt_tokens,), 2, self.vocab_size
        )
        lengths = jnp.full(counters.shape, self.prompt_tokens, jnp.int32)
        return Prompts(jax.vmap(draw)(counters), lengths, counters), counters

    def reward(self, problems: Any, tokens: Int[Array, "b t"], lengths: Int[Array, "b"]) -> Float[Array, "b"]:
        """A digit of the sum of a response's ids."""
        return (jnp.sum(tokens, axis=1) % 10).astype(jnp.float32)


def program_of(pair: Pair, config: Config, draft_length: int, kl_coef: float, adaptive: bool) -> GrpoProgram:
    """Our step; no response ends early, and the draft head is not trained."""
    law = endless_law(config.tokens)
    rule = SyntheticMatch(survival=config.survival) if config.survival and draft_length else Match()
    rollout = RolloutConfig(config.tokens, SAMPLES, draft_length, law, rule, adaptive=adaptive)
    engine = RolloutEngine(pair.policy, rollout, Numerics(), pair.drafter if draft_length else None)
    update = UpdateConfig(
        LossConfig(kl_coef=kl_coef),
        OptimizerConfig(_LEARNING_RATE),
        MicrobatchConfig(config.microbatch, widths=(1.0,)),
    )
    step = GrpoStep(engine, Scorer(pair.policy, law, Numerics()), update, None, config.run.seed)
    task = RandomTask(config.prompt_tokens, min(pair.policy.vocab_size, 16_000), config.run.seed)
    return GrpoProgram(step, make_mesh(parse_mesh(config.mesh)), PROMPTS, task)


class OurStep:
    """Steps of ours, one per call; `rollouts` are the seconds of their rollouts, timed alone before each."""

    def __init__(
        self, pair: Pair, config: Config, draft_length: int, kl_coef: float, control: Control | None = None
    ) -> None:
        self._program = program_of(pair, config, draft_length, kl_coef, control is not None)
        reference = pair.params if kl_coef else None
        state = self._program.step.init(pair.params, pair.draft if draft_length else None, reference, control)
        self._state: GrpoState = self._program.place(state)
        self._scanned = self._program.scanned(1)
        self.rollouts: list[float] = []

    def __call__(self) -> float:
        """Seconds of a step."""
        self.rollouts.append(self._rollout())
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        self._state, (_, trajectory, _) = jax.block_until_ready(self._scanned(self._state))
        seconds = time.perf_counter() - start
        assert bool(jnp.all(trajectory.lengths == trajectory.tokens.shape[-1]))
        return seconds

    def _rollout(self) -> float:
        """Seconds of the rollout that the next step will begin with."""
        served = self._program.gather(self._state)
        prompts, _ = jax.block_until_ready(self._program.issue(served))
        time.sleep(PAUSE_S)
        return seconds_of(lambda: self._program.rollout(served, prompts))()


class TheirStep:
    """Steps of a peer, one per call; `shares` are those of its rollouts, `versions` those of its libraries."""

    def __init__(self, peer: Peer, tokens: int) -> None:
        self._peer, self._tokens = peer, tokens
        self.shares: list[float] = []
        self.versions = peer.versions

    def __call__(self) -> float:
        """Seconds of a step, by the peer's clock."""
        time.sleep(PAUSE_S)
        answer = self._peer.request("step")
        assert answer["new_tokens"] == self._tokens
        self.shares.append(answer["rollout_s"] / answer["seconds"])
        return float(answer["seconds"])


def open_peer(name: str, config: Config, folder: Path, kl_coef: float, stack: ExitStack) -> TheirStep:
    """A peer that has loaded the policy and stands before its first step."""
    assert config.environments is not None
    peer = stack.enter_context(Peer(name, config.environments, log=folder / f"{name}.log"))
    fields = {"beta": kl_coef, "prompt_tokens": config.prompt_tokens, "max_new_tokens": config.tokens}
    peer.request("load", policy=str(folder / "policy"), learning_rate=_LEARNING_RATE, **fields)
    return TheirStep(peer, PROMPTS * SAMPLES * config.tokens)


def our_steps(pair: Pair, config: Config, kl_coef: float, control: Control | None) -> dict[str, OurStep]:
    """Arms of ours by name, the one without drafts first; `control` is what the controller's begins with."""
    ours = {_name(k): OurStep(pair, config, k, kl_coef) for k in (0, *config.draft_lengths)}
    if control is not None:
        ours[f"ours, up to {config.adaptive} drafts"] = OurStep(pair, config, config.adaptive, kl_coef, control)
    return ours


def _name(draft_length: int) -> str:
    return f"ours, {draft_length} drafts"


def measure_control(pair: Pair, config: Config) -> Control | None:
    """The controller before its first step; None where no arm has one."""
    if not config.adaptive:
        return None
    engine = program_of(pair, config, config.adaptive, 0.0, adaptive=True).step.engine
    context = config.prompt_tokens + config.tokens // 2
    return costs_at(None, engine, pair.params, pair.draft, PROMPTS * SAMPLES, context)


def measure(ours: Mapping[str, OurStep], config: Config, kl_coef: float, peers: Mapping[str, TheirStep]) -> Table:
    """A row of the table per arm."""
    calls: dict[str, Callable[[], float]] = {**ours, **peers}
    seconds = in_turn(calls, config.repeats, discard=2)
    rollouts = {name: np.array(arm.rollouts[-config.repeats :]) for name, arm in ours.items()}
    plain, plain_rollout = seconds[_name(0)], rollouts[_name(0)]
    passes = "reference" if kl_coef else "none"

    def row(name: str, against: Float[np.ndarray, "n"], own: Float[np.ndarray, "n"]) -> dict[str, Any]:
        figures = {"arm": name, "log_prob_pass": passes, "seconds": float(np.median(seconds[name]))}
        return figures | ratio_columns("speedup", against, own)

    table = []
    for name, rollout in rollouts.items():
        share, faster = ratio(rollout, seconds[name])[0], ratio(plain_rollout, rollout)[0]
        predicted = float(np.median(plain / (plain - plain_rollout + rollout)))
        drafted = {} if name == _name(0) else {"synthetic_survival": config.survival or None}
        table.append(
            row(name, plain, seconds[name])
            | {"rollout_share": share, "rollout_speedup": faster, "amdahl": predicted}
            | drafted
        )
    for name, peer in peers.items():
        share = float(np.median(peer.shares[-config.repeats :]))
        table.append(row(name, seconds[name], plain) | {"rollout_share": share, "peer_versions": peer.versions})
    shape = {"prompts": PROMPTS, "samples": SAMPLES, "prompt_tokens": config.prompt_tokens, "new_tokens": config.tokens}
    return [entry | shape for entry in table]


def main(config: Config) -> None:
    """Save the expanded policy, start the peers, measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter)
    check_environments(config.environments, config.peers, config.model.dtype)
    pair = open_expanded(config.model, config.run.seed)
    out = open_output(config.run, config, SCRIPT)
    control = measure_control(pair, config)
    table: Table = []
    for kl_coef in config.kl_coefs:
        # Training moves the peers' weights and fills their memory: a new process for every setting.
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
            folder = Path(scratch)
            peers: dict[str, TheirStep] = {}
            if config.environments is not None:
                save_pair(pair, config.model, folder)
                peers = {name: open_peer(name, config, folder, kl_coef, stack) for name in config.peers}
            table += measure(our_steps(pair, config, kl_coef, control), config, kl_coef, peers)
    source = provenance(config.run.seed) | parts_of(pair, config.model)
    write_results(out, table, "GRPO steps of several trainers", source)
    write_json(out / "summary.json", {"arms": len(table)} | source)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
