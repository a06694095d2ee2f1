"""Speculative rollouts against rollouts without, in seconds, on the same sequences.

Arms, in turn, with noise that is theirs in common and other in every turn: draft length 0, every fixed draft length and
the controller (in chains, and in trees with `--branches`), and the controller with a random head (which can only lose).
A batch is `sequences` responses through `rows` rows. With `--task` they are a policy's responses to real prompts, which
end as they end; else prompts are random and lengths forced: long-tailed ones are exp(N(ln 64, 0.8)), fixed by the seed
and clipped at 512. With `--context` rows begin in the middle of their texts: the caches hold so many tokens of nothing
in particular, and no prompt is read.

`speedup` is the median of paired ratios to draft length 0, with its 95% interval, `over_best_fixed` that of the
controller to the fastest fixed draft length (0 included). `allowed` is what the floors (`bare_products.py`, measured in
the same turns, attention left out) allow at the lengths of a turn and the acceptance of the longest fixed draft length
in all turns (which synthetic acceptance continues), with the best draft length for every number of live rows, the same
for all of them, after reading the prompts, if any are. `share_of_floor` is the controller's speed-up over that, by
turn: median and 95% interval; `share_with_attention` and `allowed_with_attention` are of floors that count attention to
the `--context` too. `invariant_speedup` is that of the same arm in invariant numerics, over draft length 0 in
plain ones (`--invariant`). `over_alike` is the controller to one that gives all rows as many drafts (`--alike`),
`over_chains` that with trees to that with chains.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, UInt32

from experiments.bare_products import allowed_speedup, floor_calls, floors_by_turn
from experiments.bench_models import OneDevice, ShapeOptions, SyntheticMatch, open_expanded_or_small, parts_of
from experiments.bench_work import Lengths, Work, WorkFlags, WorkOptions, make_work, noise_keys
from experiments.common import Run, RunOptions, check_least, progress, run_main
from experiments.expand import Pair
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.rollout_options import Drafts, drafter_for
from experiments.turns import in_turn, ratio_columns
from specrl_jax.drafters.combined import params_for
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.rollout.config import MOST_BESIDE, RolloutConfig
from specrl_jax.rollout.control import Body, Control, default_bodies
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match, Rule
from specrl_jax.rollout.trajectory import Trajectory
from specrl_jax.training.costs import costs_at, standing_batch
from specrl_jax.training.metrics import write_json
from specrl_jax.training.sampling import concatenate
from specrl_jax.training.speculation import response_metrics
from specrl_jax.training.speed_plots import draw_speedups

SCRIPT = "bench_rollout"
PLAIN, INVARIANT = Numerics(), Numerics("invariant")


@dataclass(frozen=True)
class Config(OneDevice):
    """Options of the measurement."""

    run: Run = RunOptions()
    model: Annotated[ShapeOptions, tyro.conf.arg(name="")] = field(default_factory=ShapeOptions)
    survival: tuple[float, ...] = (0.766, 0.877)
    """Synthetic acceptance: probability of each further draft; 0 for the real acceptance of the pair."""
    work: WorkFlags = field(default_factory=WorkOptions)
    rows: tuple[int, ...] = (1, 16)
    sequences: int = 0
    """Responses per rollout; by default as many as rows."""
    lengths: Lengths = "long-tailed"
    draft_lengths: tuple[int, ...] = (3,)
    """Fixed draft lengths to compare with."""
    drafts: Drafts = "head"
    """Where drafts come from; suffix drafts look in the text itself and in its siblings (`--samples`)."""
    samples: int = 1
    """Responses to each prompt."""
    branches: int = 1
    """Above 1, trees too, of fixed draft lengths and under the controller, with so many candidates at each depth."""
    longest: int = 7
    """Most drafts of a row under the controller."""
    random_drafter: bool = False
    """Measure the controller with a random head too."""
    context: int = 0
    """Tokens in the caches of all rows before the first is drawn, in place of prompts that are read."""
    alike: bool = False
    """Measure the controller with as many drafts for all rows too."""
    invariant: bool = False
    """Measure draft length 0 and the controller in invariant numerics too."""
    ladder: bool = True
    """Move live rows into smaller batches, in all arms; without, every round is of all rows."""
    floors: bool = True
    """Measure the floors of bare products too; leave it out where compiling them takes too long."""
    costs: str | None = None
    """Cost tables to read, or to write where there are none yet: named without the end, `.16.json` for 16 rows."""
    repeats: int = 15

    def __post_init__(self) -> None:
        check_least("", self, repeats=3, sequences=0, longest=1, branches=1, samples=1, context=0)
        if not all(0.0 <= s < 1.0 for s in self.survival):
            raise InputError(f"--survival is {self.survival}; choose probabilities from 0 (real acceptance) to below 1")
        task = self.work.task
        if task is not None and (self.model.policy is None or self.survival != (0.0,)):
            raise InputError(f"--task {task} is for the real acceptance of --policy and --survival 0; give both")
        if any(count % self.samples for count in (self.rows if not self.sequences else (self.sequences,))):
            raise InputError(f"--samples is {self.samples}, which does not divide the sequences; choose a divisor")
        if self.context and not all(self.survival):
            raise InputError(f"--context is {self.context}, of synthetic acceptance; give --survival above 0")
        if self.context and (self.samples > 1 or any(self.sequences > rows for rows in self.rows)):
            raise InputError(
                f"--context {self.context} is of rows that begin together; leave --sequences, --samples out"
            )
        if self.context and self.work.prompt_tokens != WorkOptions.prompt_tokens:
            raise InputError(f"--context {self.context} is in place of prompts; leave --prompt-tokens out")
        if self.drafts != "head" and any(self.survival):
            raise InputError(f"--drafts {self.drafts} is for real acceptance; give --survival 0")
        if self.random_drafter and self.drafts != "head":
            raise InputError("--random-drafter is a head; give it with --drafts head")
        if self.branches > 1 and any(self.survival):
            raise InputError(f"--branches {self.branches} is for real acceptance; give --survival 0")
        if self.branches > 1 and self.branches * self.longest > MOST_BESIDE:
            raise InputError(
                f"--branches {self.branches} with --longest {self.longest} exceeds {MOST_BESIDE}; lower one"
            )
        if min(self.draft_lengths, default=0) < 1 or not self.survival:
            raise InputError("--draft-lengths must name numbers of at least 1 and --survival at least one probability")
        if max(self.draft_lengths) > self.longest:
            most = max(self.draft_lengths)
            raise InputError(f"--draft-lengths names {most}, above --longest {self.longest}; raise that, or lower it")
        if self.costs is not None and not Path(self.costs).absolute().parent.is_dir():
            raise InputError(f"--costs {self.costs} is in no folder that exists; make it first")
        if min(self.rows, default=0) < 1:
            raise InputError("--rows must name at least one number, all of them at least 1")


PRESETS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "smoke": {
        "model": {"shape": "toy"},
        "rows": (2,),
        "survival": (0.877,),
        "lengths": "equal",
        "work": {"tokens": 8},
        "draft_lengths": (2,),
        "longest": 3,
        "repeats": 3,
    },
}


@dataclass
class Arm:
    """A way to roll out, timed turn by turn with noise that arms have in common and turns do not.

    params, draft: of policy and drafter, None without drafts. context: tokens in the caches to begin with, in place of
    prompts. control: what it began with. epoch: of the noise of its first turn. turns: what it wrote, on the host.
    """

    engine: RolloutEngine
    params: PolicyParams
    draft: Any
    work: Work
    context: int = 0
    control: Control | None = None
    epoch: int = 0
    turns: list[Trajectory] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._state = self.control

    def __call__(self) -> float:
        """Seconds of one rollout. It starts with what the one before learned, as in training."""
        samples, epoch = self.engine.config.samples_per_prompt, self.epoch + len(self.turns)
        keys = noise_keys(self.work.prompts, samples, self.work.seed, epoch)
        last, seconds = (self._go_on if self.context else self._roll_out)(jax.block_until_ready(keys))
        self._state = last.control
        self.turns.append(jax.device_get(replace(last, control=None)))
        return seconds

    def _roll_out(self, keys: UInt32[Array, "b 2"]) -> tuple[Trajectory, float]:
        """From prompts to the last token."""
        program, limits = rollout_program(self.engine), jnp.asarray(self.work.limits)
        start = time.perf_counter()
        last = program(self.params, self.draft, self.work.prompts, keys, limits, self._state)
        return jax.block_until_ready(last), time.perf_counter() - start

    def _go_on(self, keys: UInt32[Array, "b 2"]) -> tuple[Trajectory, float]:
        """From the first token to the last, of rows whose caches are filled before the clock starts."""
        batch = standing_batch(self.engine, len(self.work.limits), self.context, self._state)
        rows = replace(batch.rows, keys=keys, limit=jnp.asarray(self.work.limits))
        # As arrays of its own: the program takes their memory. The cache is not copied, which may be large.
        own = jax.tree.map(jnp.copy, replace(batch, rows=rows, pool=replace(batch.pool, keys=(), values=())))
        pool = replace(own.pool, keys=batch.pool.keys, values=batch.pool.values)
        program, batch = rest_program(self.engine), jax.block_until_ready(replace(own, pool=pool))
        start = time.perf_counter()
        last = jax.block_until_ready(program(self.params, self.draft, batch, keys))
        seconds = time.perf_counter() - start
        return replace(last.trajectory, control=last.control), seconds

    def figures(self, turns: int) -> dict[str, Any]:
        """Entropy in nats per token, acceptance, and how often each body ran, in all of the last so many turns."""
        all_of_them = concatenate(self.turns[-turns:])
        figures, ran = response_metrics(all_of_them), all_of_them.stats.bodies.tolist()
        if ran:
            bodies = self.engine.config.bodies_for(self.engine.layout(*self.turns[-1].prompts.tokens.shape).rows)
            figures["bodies"] = " ".join(f"{o.rows}x{o.tokens}:{n}" for o, n in zip(bodies, ran, strict=True) if n)
        return figures


def round_times(control: Control, bodies: Sequence[Body], longest: int, context: int) -> str:
    """Milliseconds of a round of each body with its draft steps, as the cost table has them at so many tokens a row."""
    table = zip(bodies, *jax.device_get((control.seconds, control.per_slot, control.per_step)), strict=True)
    taken = [
        (body, s + slot * context * body.rows + step * max(0, body.depth(longest) - 1)) for body, s, slot, step in table
    ]
    return " ".join(f"{body.rows}x{body.tokens}:{1e3 * s:.3g}" for body, s in taken)


def rollout_of(
    config: Config, pair: Pair, work: Work, rows: int, k: int, rule: Rule, adaptive: bool, numerics: Numerics = PLAIN
) -> RolloutEngine:
    """The engine of one arm."""
    sizes = {body.rows for body in default_bodies(rows, config.longest)} if config.ladder else {rows}
    ladder = tuple(size / rows for size in sizes)
    settings = RolloutConfig(
        work.longest, config.samples, k, work.law, rule, adaptive=adaptive, rows=rows, ladder=ladder, smallest_rung=1
    )
    if adaptive and not config.ladder:
        settings = replace(settings, bodies=tuple(body for body in settings.bodies_for(rows) if body.rows == rows))
    return RolloutEngine(pair.policy, settings, numerics, drafter_for(config.drafts, pair.drafter) if k else None)


@lru_cache(maxsize=32)
def rollout_program(engine: RolloutEngine) -> Any:
    """The compiled rollout; engines that are equal share one."""
    return jax.jit(engine.rollout)


@lru_cache(maxsize=32)
def rest_program(engine: RolloutEngine) -> Any:
    """The compiled rest of a rollout that has begun."""
    return jax.jit(engine.finish, donate_argnums=2)


def fixed_arm(engine: RolloutEngine, pair: Pair, work: Work, context: int = 0) -> Arm:
    """A fixed draft length."""
    draft = params_for(engine.drafter, pair.draft) if engine.speculative else None
    return Arm(engine, pair.params, draft, work, context)


def random_head(draft: Any, seed: int) -> Any:
    """The draft model with weights that mean nothing."""
    small = isinstance(draft, PolicyParams)
    leaves, tree = jax.tree.flatten(draft if small else draft.weights)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [0.05 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    weights = jax.tree.unflatten(tree, drawn)
    return weights if small else replace(draft, weights=weights)


def measure(
    pair: Pair, config: Config, rows: int, work: Work, survival: float, floors: Mapping[str, Callable[[], float]]
) -> list[dict[str, Any]]:
    """A row of the table per arm; `floors` are timed with them."""
    rows = min(rows, len(work.limits))
    rule = SyntheticMatch(survival=survival) if survival else Match()
    prompt_tokens = 0 if config.context else int(work.prompts.tokens.shape[1])
    context = prompt_tokens + config.context + 64

    def controlled(numerics: Numerics, name: str, rule: Rule = rule) -> Arm:
        chosen = rollout_of(config, pair, work, rows, config.longest, rule, True, numerics)
        path = Path(f"{config.costs}.{name}{rows}.json") if config.costs else None
        draft = params_for(chosen.drafter, pair.draft)
        control = costs_at(path, chosen, pair.params, draft, rows, context)
        return Arm(chosen, pair.params, draft, work, config.context, control)

    adaptive = controlled(PLAIN, "")
    assert adaptive.control is not None
    bodies = adaptive.engine.config.bodies_for(rows)
    times = round_times(adaptive.control, bodies, config.longest, context)
    fixed = {"0": fixed_arm(rollout_of(config, pair, work, rows, 0, Match(), False), pair, work, config.context)}
    for k in config.draft_lengths:
        fixed[str(k)] = fixed_arm(rollout_of(config, pair, work, rows, k, rule, False), pair, work, config.context)
        if config.branches > 1:
            engine = rollout_of(config, pair, work, rows, k, Match(branches=config.branches), False)
            fixed[f"{k}, {config.branches} branches"] = fixed_arm(engine, pair, work, config.context)
    arms = fixed | {"adaptive": adaptive}
    with_trees = f"adaptive, {config.branches} branches"
    if config.branches > 1:
        arms[with_trees] = controlled(PLAIN, f"{config.branches}.", Match(branches=config.branches))
    if config.random_drafter:
        random = random_head(pair.draft, config.run.seed)
        engine = rollout_of(config, pair, work, rows, config.longest, Match(), adaptive=True)
        arms["adaptive, random head"] = replace(adaptive, engine=engine, draft=random, turns=[])
    if config.alike:
        settings = replace(adaptive.engine.config, per_row=False)
        engine = replace(adaptive.engine, config=settings)
        arms["adaptive, alike"] = replace(adaptive, engine=engine, turns=[])
    twins = {}
    if config.invariant:
        without = rollout_of(config, pair, work, rows, 0, Match(), False, INVARIANT)
        twins = {"0": fixed_arm(without, pair, work, config.context), "adaptive": controlled(INVARIANT, "invariant.")}
    named = {f"{name}, invariant": arm for name, arm in twins.items()}
    seconds = in_turn(arms | named | dict(floors), config.repeats, discard=2)
    lengths = [np.asarray(turn.lengths) for turn in arms["0"].turns[-config.repeats :]]
    best = max(fixed, key=lambda name: float(np.median(seconds["0"] / seconds[name])))
    figures = {name: arm.figures(config.repeats) for name, arm in arms.items()}
    survivals = list(figures[str(max(config.draft_lengths))].get("survival_per_position", []))
    while survival and survivals and len(survivals) < config.longest:
        survivals.append(survivals[-1] * survival)
    read = 0 if config.context else int(jnp.sum(work.prompts.lengths))
    turns = zip(floors_by_turn(seconds), lengths, strict=bool(floors))
    of_turns = [
        [allowed_speedup(floor, own, rows, survivals, read) for floor in (turn.without_attention, turn)]
        for turn, own in turns
    ]
    allowed, with_attention = np.array(of_turns).reshape(-1, 2).T
    shared: dict[str, Any] = {
        "workload": config.work.task or ("synthetic" if survival else "random"),
        "branchy": config.work.branchy or None,
        "rows": rows,
        "sequences": len(work.limits),
        "lengths": "natural" if config.work.task else config.lengths,
        "longest_response": int(max(own.max() for own in lengths)),
        "prompt_tokens": prompt_tokens,
        "context": config.context or None,
        "ladder": config.ladder,
        "drafts": config.drafts,
        "temperature": work.temperature,
        "synthetic_survival": survival or None,
    }
    table = []
    for name in arms:
        row: dict[str, Any] = shared | {
            "draft_length": name,
            "seconds": float(np.median(seconds[name])),
            "tokens_per_second": float(np.median([own.sum() for own in lengths] / seconds[name])),
        }
        row |= ratio_columns("speedup", seconds["0"], seconds[name])
        row |= {key: figures[name].get(key) for key in ("acceptance_length", "entropy", "bodies")}
        if name in twins:
            row |= ratio_columns("invariant_speedup", seconds["0"], seconds[f"{name}, invariant"])
        if name.endswith("random head"):
            row |= {"workload": config.work.task or "random", "synthetic_survival": None}
        if name == with_trees:
            row |= ratio_columns("over_chains", seconds["adaptive"], seconds[name])
        if name == "adaptive":
            row |= {"cost_table_ms": times, "best_fixed": best} | ratio_columns(
                "over_best_fixed", seconds[best], seconds[name]
            )
            if floors:
                row |= ratio_columns("share_of_floor", seconds["0"] / seconds[name], allowed)
                row |= {"allowed": float(np.median(allowed))}
            if floors and config.context:
                row |= ratio_columns("share_with_attention", seconds["0"] / seconds[name], with_attention)
                row |= {"allowed_with_attention": float(np.median(with_attention))}
            if config.alike:
                row |= ratio_columns("over_alike", seconds["adaptive, alike"], seconds[name])
        table.append(row)
    return table


def main(config: Config) -> None:
    """Measure, write and print."""
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter, data=config.work.data)
    source = (config.model.policy, config.model.target.vocab_size, config.lengths, config.run.seed)
    works = {rows: make_work(config.work, config.sequences or rows, *source, config.samples) for rows in config.rows}
    pair = open_expanded_or_small(config.model, config.run.seed)
    for rows, work in works.items():
        width = config.context + 1 if config.context else work.prompts.tokens.shape[1]
        rollout_of(config, pair, work, rows, 0, Match(), False).check_prompt_width(width)
    out = open_output(config.run, config, SCRIPT)
    headed = config.floors and config.drafts == "head" and isinstance(pair.drafter, Eagle3Drafter)
    floors = {rows: floor_calls(pair, rows, config.longest, config.context) if headed else {} for rows in config.rows}
    cases = [(rows, survival) for survival in config.survival for rows in config.rows]
    table: list[dict[str, Any]] = []
    with progress("cases", len(cases)) as advance:
        for rows, survival in cases:
            table += measure(pair, config, rows, works[rows], survival, floors[rows])
            advance(1, f"{rows} rows: {table[-1]['speedup']:.2f}x")
    origin = provenance(config.run.seed) | parts_of(pair, config.model)
    write_results(out, table, "Rollout with and without drafts", origin)
    draw_speedups(table).savefig(out / "speedups.png", dpi=120)
    write_json(out / "summary.json", {"best_speedup": max(row["speedup"] for row in table)} | origin)
    print(markdown_table(table), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
