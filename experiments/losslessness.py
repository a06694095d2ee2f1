"""Does speculation change anything? The same sequences drawn by many programs, and compared.

- Plain numerics: every drafter, draft length, tree, order and batch against autoregressive decoding. The only
  difference allowed is a rounding tie; each is listed, and their number compared with its prediction.
- Invariant numerics, float32 and bfloat16: no difference at all, and log-probs equal to the training
  forward's to the bit. What that costs, by rows.
- Plain bfloat16: how often it differs.
- Meshes (`--parts mesh`), with and without drafts: no difference where `tensor` is 1 and numerics invariant, rounding
  ties where it is above.

`--policy runs/demo/policy --drafter runs/demo/drafter --task arithmetic` takes the demo's policy.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import Run, RunOptions, check_least, progress, run_main
from experiments.exactness import (
    Arm,
    Rounding,
    Scene,
    compared_tokens,
    first_differences,
    gaps,
    roll,
    rounding,
)
from experiments.inference import (
    Model,
    ModelFlags,
    ModelOptions,
    ProblemFlags,
    ProblemOptions,
    check_run,
    open_model,
    open_problems,
)
from experiments.outputs import markdown_table, open_output, provenance, write_results
from experiments.probe_drafters import Adversary, corrupted
from experiments.turns import in_turn, ratio_columns, seconds_of
from specrl_jax.drafters.heads import init_head
from specrl_jax.drafters.protocol import Drafter
from specrl_jax.drafters.replay import Replay, ReplayDrafter
from specrl_jax.drafters.small_policy import SmallPolicyDrafter
from specrl_jax.errors import InputError
from specrl_jax.models.config import Dtype
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import init_params
from specrl_jax.models.tree import Tree
from specrl_jax.parallel.mesh import parse_mesh
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.rules import Match
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Trajectory, to_sequences
from specrl_jax.training.metrics import write_json
from specrl_jax.training.plots import draw_losslessness

SCRIPT = "losslessness"
PLAIN, INVARIANT = Numerics("plain"), Numerics("invariant")
ALONE = 16
"""Sequences that are drawn one row at a time."""


@dataclass(frozen=True)
class Config:
    """Options of the report."""

    run: Run = RunOptions()
    model: ModelFlags = ModelOptions()
    problem: ProblemFlags = ProblemOptions(task="arithmetic", problems=2048)
    """Problems whose responses are drawn, one each; the plain arms."""
    invariant_problems: int = 768
    """The invariant arms take so many of them."""
    batch: int = 256
    """Rows together; the numbers of problems are multiples of it."""
    max_new_tokens: int = 192
    temperature: float = 1.0
    corruption: float = 0.1
    """Share of wrong tokens in the replayed responses."""
    parts: tuple[Literal["plain", "invariant", "costs", "mesh"], ...] = ("plain", "invariant", "costs")
    """What to run; times are to be trusted only where nothing else runs."""
    meshes: tuple[str, ...] = ("data=8", "data=4,fsdp=2", "data=2,fsdp=2,tensor=2", "data=2,tensor=4")
    """Of the mesh part."""
    drafters: tuple[Literal["trained", "random", "adversary", "replay"], ...] = (
        "trained",
        "random",
        "adversary",
        "replay",
    )
    draft_lengths: tuple[int, ...] = (1, 2, 3, 5, 7)
    cost_rows: tuple[int, ...] = (1, 8, 32, 64)
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    """Of the invariant arms and of the costs."""
    token_blocks: tuple[int, ...] = (8, 16, 64)
    """Tokens per block of the invariant forward; small batches want small blocks."""
    cost_tokens: int = 48
    """Tokens per row of the timed rollouts."""
    repeats: int = 5

    def __post_init__(self) -> None:
        check_least("", self, batch=1, invariant_problems=1, max_new_tokens=1, repeats=1, cost_tokens=2)
        for name, count in (("problems", self.problem.problems), ("invariant-problems", self.invariant_problems)):
            if count % self.batch:
                raise InputError(f"--{name} is {count}; choose a multiple of --batch {self.batch}")
        if not (self.parts and self.drafters):
            raise InputError("--parts and --drafters must name at least one each")
        for name in ("cost_rows", "token_blocks"):
            if min(getattr(self, name), default=0) < 1:
                raise InputError(f"--{name.replace('_', '-')} must name at least one number, all of them at least 1")
        if SamplingLaw(self.temperature).greedy:
            raise InputError(f"--temperature is {self.temperature}; draws need one above 0")
        for mesh in self.meshes:
            if self.batch % (parse_mesh(mesh).data * parse_mesh(mesh).fsdp):
                raise InputError(f"--meshes {mesh}: --batch {self.batch} does not split over it; choose another")
        for arm in (*plain_arms(self, list(self.drafters)), *invariant_arms(self, list(self.drafters))):
            _ = arm.tree  # refuses draft lengths out of range
        if not max(self.cost_rows, default=0) <= self.invariant_problems <= self.problem.problems:
            raise InputError(
                f"--cost-rows go up to {max(self.cost_rows, default=0)}, --invariant-problems is "
                f"{self.invariant_problems} and --problems {self.problem.problems}; none may exceed the next"
            )
        if not 0.0 <= self.corruption <= 1.0:
            raise InputError(f"--corruption is {self.corruption}; choose a share from 0 to 1")

    @property
    def mesh(self) -> str:
        """The largest one; all parts but that of meshes take one device."""
        sizes = {mesh: parse_mesh(mesh).size for mesh in self.meshes if "mesh" in self.parts}
        return max(sizes, key=lambda mesh: sizes[mesh], default="data=1")


SMOKE = {
    "meshes": ("data=2", "tensor=2"),
    "problem": {"problems": 16},
    "invariant_problems": 16,
    "batch": 16,
    "max_new_tokens": 24,
    "parts": ("plain", "invariant"),
    "dtypes": ("float32",),
    "drafters": ("trained",),
    "draft_lengths": (2,),
    "cost_rows": (8,),
    "token_blocks": (8,),
    "cost_tokens": 8,
    "repeats": 2,
}
PRESETS: dict[str, Mapping[str, Any]] = {"default": {}, "smoke": SMOKE}


def drafters_of(model: Model, config: Config, reference: Trajectory) -> dict[str, tuple[Drafter, Any]]:
    """The drafters of the arms by name, with their parameters for a batch of sequences."""
    assert model.params is not None
    assert model.drafter is not None
    key, random = jax.random.key(config.run.seed + 7), model.draft
    if isinstance(model.drafter, SmallPolicyDrafter):
        random = init_params(key, model.drafter.config)
    else:
        head = model.drafter.config
        random = init_head(key, head, model.params, np.arange(head.draft_vocab_size))
    tokens = corrupted(np.asarray(reference.tokens), config.corruption, model.policy.vocab_size, config.run.seed)

    def replay(rows: Any) -> Replay:
        return Replay(jnp.asarray(tokens[rows]))

    found: dict[str, tuple[Drafter, Any]] = {
        "trained": (model.drafter, lambda rows: model.draft),
        "random": (model.drafter, lambda rows: random),
        "adversary": (Adversary(model.drafter), lambda rows: model.draft),
        "replay": (ReplayDrafter(model.policy.vocab_size), replay),
    }
    return {name: found[name] for name in config.drafters}


def plain_arms(config: Config, names: list[str]) -> list[Arm]:
    """Chains of every length and drafter, trees, other orders and batches."""
    batch = config.batch
    chains = [Arm(PLAIN, k, drafter=name, batch=batch) for name in names for k in config.draft_lengths]
    rules = ((3, Match(2)), (2, Match(3)), (2, Match(2, "full")))
    trees = [Arm(PLAIN, k, rule, name, batch) for name in names for k, rule in rules]
    others = [
        Arm(PLAIN, batch=batch, permuted=True),
        Arm(PLAIN, batch=max(1, batch // 4)),
        Arm(PLAIN, 3, drafter=names[0], batch=max(1, batch // 4), permuted=True),
        Arm(PLAIN, 3, Match(2), names[0], max(1, batch // 4), permuted=True),
    ]
    return chains + trees + others


def invariant_arms(config: Config, names: list[str]) -> list[Arm]:
    """Rows from 1 to 64 and beyond, draft lengths, a tree, and caches of other capacities."""
    lengths = sorted({0, *config.draft_lengths})
    arms = [Arm(INVARIANT, k, drafter=names[0], batch=min(64, config.batch), spare=16 * k) for k in lengths]
    arms += [Arm(INVARIANT, 3, drafter=names[-1], batch=batch) for batch in sorted({8, 32, config.batch})]
    return [*arms, Arm(INVARIANT, 2, Match(3), names[0], min(64, config.batch), permuted=True)]


def describe(arm: Arm, dtype: str) -> dict[str, Any]:
    """The arm in words."""
    shape = f"tree {arm.rule.branches} {arm.rule.shape}" if not arm.tree.is_chain else "chain"  # type: ignore[attr-defined]
    return {
        "numerics": arm.numerics.mode,
        "dtype": dtype,
        "drafter": arm.drafter,
        "draft_length": arm.draft_length,
        "shape": shape if arm.draft_length else "-",
        "batch": arm.batch,
        "permuted": arm.permuted,
        "spare_slots": arm.spare,
        "mesh": str(arm.mesh),
    }


def compare(scene: Scene, arm: Arm, reference: Trajectory, ties_per_token: float | None) -> dict[str, Any]:
    """One arm against the reference, as a row."""
    ours = roll(scene, arm)
    first = first_differences(ours, reference)
    tokens = compared_tokens(first, reference)
    found = int((first >= 0).sum())
    row = describe(arm, scene.policy.dtype) | {
        "tokens": tokens,
        "divergences": found,
        "accepted": int(ours.stats.accepted + ours.stats.cut_accepted),
        "rounds": int(ours.stats.rounds + ours.stats.cut_rounds),
        "cut_rounds": int(ours.stats.cut_rounds),
        "truncated_alike": bool(np.array_equal(ours.ended[first < 0], reference.ended[first < 0])),
    }
    if ties_per_token is not None:
        expected = ties_per_token * tokens
        ties = gaps(scene, reference, first) if found <= 64 else []
        row |= {"expected": expected, "within_3_sigma": found <= expected + 3 * np.sqrt(expected), "ties": ties}
    return row


def plain_part(scene: Scene, model: Model, config: Config) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All plain arms against plain autoregressive decoding."""
    reference = roll(scene, Arm(PLAIN, batch=config.batch))
    scene = dataclasses.replace(scene, drafters=drafters_of(model, config, reference))
    some = to_sequences(jax.tree.map(lambda x: jnp.asarray(x[: config.batch]), strip(reference)))
    rows: list[dict[str, Any]] = []
    roundings: dict[tuple[Tree, int], Rounding] = {}

    def measured_for(tree: Tree, batch: int) -> Rounding:
        if (tree, batch) not in roundings:
            roundings[tree, batch] = rounding(scene, PLAIN, some, tree, batch)
        return roundings[tree, batch]

    # The ladder decodes in fewer rows too, so that even the same batch in another order is another program.
    fewer = measured_for(Tree.chain(0), max(1, config.batch // 4))
    arms = plain_arms(config, list(scene.drafters))
    with progress("plain", len(arms)) as advance:
        for arm in arms:
            measured = max(fewer, measured_for(arm.tree, arm.batch), key=lambda found: found.rms)
            row = compare(scene, arm, reference, measured.ties_per_token)
            within = all(tie["gap"] <= 6 * measured.rms for tie in row["ties"])
            rows.append(row | {"rms": measured.rms, "ties_within_6_rms": within})
            advance(1, f"{row['tokens']} tokens, {row['divergences']} divergences")
    chain, tree = ([r for r in rows if r["shape"].startswith(kind)] for kind in ("chain", "tree"))
    figures = {
        "plain_tokens_chains": sum(r["tokens"] for r in chain),
        "plain_tokens_trees": sum(r["tokens"] for r in tree),
        "plain_divergences": sum(r["divergences"] for r in rows),
        "plain_expected": sum(r["expected"] for r in rows),
        "plain_ties": [tie for r in rows for tie in r["ties"]],
        "plain_ties_within_6_rms": all(r["ties_within_6_rms"] for r in rows),
        "rms": max(r.rms for r in roundings.values()),
        "collision": float(np.mean([r.collision for r in roundings.values()])),
        "entropy": float(np.mean([r.entropy for r in roundings.values()])),
        "plain_truncated_alike": all(r["truncated_alike"] for r in rows),
    }
    expected = figures["plain_expected"]
    figures["plain_within_3_sigma"] = figures["plain_divergences"] <= expected + 3 * np.sqrt(expected)
    return rows, figures


def mesh_part(scene: Scene, model: Model, config: Config) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every mesh against one device, with the trained head and without drafts, each in its own numerics."""
    rows: list[dict[str, Any]] = []
    meshes = [parse_mesh(mesh) for mesh in config.meshes]
    for numerics, own in (
        (INVARIANT, [m for m in meshes if m.tensor == 1]),
        (PLAIN, [m for m in meshes if m.tensor > 1]),
    ):
        if not own:
            continue
        reference = roll(scene, Arm(numerics, batch=config.batch))
        here = dataclasses.replace(scene, drafters=drafters_of(model, config, reference))
        found = Rounding(0.0, 0.0, 0.0)
        if not numerics.invariant:
            some = to_sequences(jax.tree.map(lambda x: jnp.asarray(x[: config.batch]), strip(reference)))
            found = rounding(here, PLAIN, some, Tree.chain(0), max(1, config.batch // 4))
        arms = [
            Arm(numerics, k, drafter=config.drafters[0] if k else "none", batch=config.batch, mesh=mesh)
            for mesh in own
            for k in (0, config.draft_lengths[0])
        ]
        with progress(f"meshes {numerics.mode}", len(arms)) as advance:
            for arm in arms:
                row = compare(here, arm, reference, found.ties_per_token)
                within = all(tie["gap"] <= 6 * found.rms for tie in row["ties"])
                rows.append(row | {"rms": found.rms, "ties_within_6_rms": within})
                advance(1, f"{row['tokens']} tokens, {row['divergences']} divergences")
    by_kind = {
        kind: [r for r in rows if (r["numerics"] == "plain") == (kind == "tensor")] for kind in ("rows", "tensor")
    }
    figures: dict[str, Any] = {}
    for kind, some_rows in by_kind.items():
        figures[f"mesh_{kind}_tokens"] = sum(r["tokens"] for r in some_rows)
        figures[f"mesh_{kind}_divergences"] = sum(r["divergences"] for r in some_rows)
    figures["mesh_tensor_expected"] = sum(r["expected"] for r in by_kind["tensor"])
    figures["mesh_tensor_ties"] = [
        tie | {"mesh": r["mesh"], "draft_length": r["draft_length"]} for r in by_kind["tensor"] for tie in r["ties"]
    ]
    figures["mesh_ties_within_6_rms"] = all(r["ties_within_6_rms"] for r in rows)
    return rows, figures


def strip(trajectory: Trajectory) -> Trajectory:
    """Without its counts, so that rows can be taken of every leaf."""
    return dataclasses.replace(trajectory, stats=None, entropy_sum=None)  # type: ignore[arg-type]


def take(scene: Scene, count: int) -> Scene:
    """The first sequences of a scene."""
    return dataclasses.replace(scene, prompts=jax.tree.map(lambda x: x[:count], scene.prompts))


def invariant_part(scene: Scene, model: Model, config: Config) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All invariant arms against decoding without speculation, and log-probs against the training forward."""
    reference = roll(scene, Arm(INVARIANT, batch=config.batch))
    scene = dataclasses.replace(scene, drafters=drafters_of(model, config, reference))
    names = list(scene.drafters)
    rows = []
    # One row at a time takes long: a few sequences.
    alone = min(ALONE, scene.count)
    few = jax.tree.map(lambda x: x[:alone], strip(reference))
    for arm in (
        Arm(INVARIANT, batch=1),
        Arm(INVARIANT, 3, drafter=names[0], batch=1),
        Arm(INVARIANT, 2, Match(3), names[0], 1),
    ):
        first = first_differences(strip(roll(take(scene, alone), arm)), few)
        found = {"tokens": compared_tokens(first, few), "divergences": int((first >= 0).sum())}
        rows.append(describe(arm, scene.policy.dtype) | found)
    arms = invariant_arms(config, names)
    with progress(f"invariant {scene.policy.dtype}", len(arms)) as advance:
        for arm in arms:
            rows.append(compare(scene, arm, reference, None))
            advance(1, f"{rows[-1]['tokens']} tokens, {rows[-1]['divergences']} divergences")
    sequences = to_sequences(jax.tree.map(jnp.asarray, strip(reference)))
    scorer = Scorer(scene.policy, scene.law, INVARIANT)
    microbatch = MicrobatchConfig(math.gcd(16, scene.count), (0.4, 0.7, 1.0))
    trained = jax.jit(lambda params: scorer.log_probs(params, sequences, microbatch))(scene.params)
    mask = np.asarray(sequences.mask)
    differ = np.asarray(trained)[mask] != np.asarray(sequences.log_probs)[mask]
    name = f"invariant_{scene.policy.dtype}"
    return rows, {
        f"{name}_tokens": sum(r["tokens"] for r in rows),
        f"{name}_divergences": sum(r["divergences"] for r in rows),
        f"{name}_log_probs": int(mask.sum()),
        f"{name}_log_probs_differing": int(differ.sum()),
    }


def plain_bfloat16(scene: Scene, model: Model, config: Config) -> dict[str, Any]:
    """What the trained head's drafts change in plain bfloat16, as a row."""
    reference = roll(scene, Arm(PLAIN, batch=config.batch))
    scene = dataclasses.replace(scene, drafters=drafters_of(model, config, reference))
    return compare(scene, Arm(PLAIN, 3, drafter=config.drafters[0], batch=config.batch), reference, None)


def costs(scene: Scene, config: Config) -> list[dict[str, Any]]:
    """Time of an invariant decode step over a plain one, by rows and block size, in turn."""
    law = dataclasses.replace(scene.law, min_new_tokens=config.cost_tokens)
    rollout = RolloutConfig(config.cost_tokens, 1, 0, law, ladder=(1.0,), smallest_rung=1)
    kinds = {0: PLAIN} | {b: Numerics("invariant", token_block=b, row_block=min(b, 16)) for b in config.token_blocks}
    rows = []
    for count in config.cost_rows:
        part = take(scene, count)
        engines = {block: RolloutEngine(scene.policy, rollout, numerics) for block, numerics in kinds.items()}
        seconds = in_turn({str(block): decoding(engine, part) for block, engine in engines.items()}, config.repeats)
        plain = seconds.pop("0")
        for block, measured in seconds.items():
            row: dict[str, Any] = {"rows": count, "dtype": scene.policy.dtype, "token_block": int(block)}
            row |= ratio_columns("cost", measured, plain)
            rows.append(row | {"plain_step_ms": 1e3 * float(np.median(plain)) / (config.cost_tokens - 1)})
    return rows


def decoding(engine: RolloutEngine, scene: Scene) -> Callable[[], float]:
    """Seconds of a rollout beside those of reading its prompts."""
    programs = (jax.jit(engine.rollout), jax.jit(engine.start))
    whole, prefill = (seconds_of(partial(p, scene.params, None, scene.prompts, scene.keys)) for p in programs)
    return lambda: whole() - prefill()


def cast(model: Model, dtype: Any) -> Model:
    """The policy in another dtype."""
    params = jax.tree.map(lambda x: x.astype(dtype), model.params)
    return dataclasses.replace(model, policy=dataclasses.replace(model.policy, dtype=dtype), params=params)


def main(config: Config) -> None:
    """Run every part, write and print."""
    check_run(config.run, SCRIPT, config.model, config.problem)
    model = open_model(dataclasses.replace(config.model, mesh="data=1"), config.run, config.problem.problems)
    if model.drafter is None:
        raise InputError("--drafter is missing; give the draft head whose drafts are to be tested")
    workload = open_problems(config.problem, model.tokenizer)
    law = SamplingLaw(config.temperature, end_ids=workload.end_ids)
    rollout = RolloutConfig(config.max_new_tokens, 1, 0, law)
    RolloutEngine(model.policy, rollout, PLAIN).check_prompt_width(workload.prompt_width)
    prompts, _ = workload.held_out(config.problem.split, config.problem.problems)
    if len(prompts.lengths) % config.batch:
        raise InputError(f"there are {len(prompts.lengths)} problems; choose --problems and --batch that fit")
    out = open_output(config.run, config, SCRIPT)
    model = model.initialised(config.run.seed)
    assert model.params is not None
    # Arms with spare slots must not run into the longest context of the policy.
    roomy = dataclasses.replace(model.policy, max_position_embeddings=2 * model.policy.max_position_embeddings)
    model = dataclasses.replace(model, policy=roomy)

    def scene(model: Model) -> Scene:
        assert model.params is not None
        return Scene(model.policy, model.params, prompts, law, config.max_new_tokens, config.run.seed, {})

    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    timed: list[dict[str, Any]] = []
    if "plain" in config.parts:
        rows, figures = plain_part(scene(model), model, config)
    if "mesh" in config.parts:
        more, found = mesh_part(scene(model), model, config)
        rows, figures = rows + more, figures | found
    for dtype in config.dtypes:
        here = cast(model, dtype)
        part = take(scene(here), config.invariant_problems)
        if "invariant" in config.parts:
            more, found = invariant_part(part, here, config)
            rows, figures = rows + more, figures | found
        if "invariant" in config.parts and dtype == "bfloat16":
            rows.append(plain_bfloat16(part, here, config))
            figures["plain_bfloat16_divergences_per_million"] = 1e6 * rows[-1]["divergences"] / rows[-1]["tokens"]
        if "costs" in config.parts:
            timed += costs(part, config)
    source = provenance(config.run.seed)
    write_results(out, [{k: v for k, v in row.items() if k != "ties"} for row in rows], "Losslessness", source)
    write_json(out / "summary.json", figures | {"costs": timed} | source)
    draw_losslessness(rows, timed).savefig(out / "losslessness.png", dpi=120)
    print(markdown_table([{"figure": name, "value": value} for name, value in figures.items()]))
    if timed:
        print(markdown_table(timed), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
