"""Where the time of a GRPO step goes on a mesh: the gather of weights, and collectives.

The same step on every mesh, in pieces, in turn. `gather_share` is the part of a step in which the training's weights
are brought into the rollout's layout; `collectives_share` the part of the devices' busy time that a profiler's trace of
one step gives to collectives (all-reduce, all-gather, reduce-scatter, collective-permute, all-to-all), waiting for the
slowest device included; `rollout_collectives_share` the same of the rollout alone. The policy is not trained: it writes
responses of full length. Of virtual devices on one host these are shares, not speeds.
"""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import train_grpo, train_options
from experiments.common import check_least, progress, run_main
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from experiments.rollout_options import SpeculationFlags, SpeculationOptions
from experiments.train_options import Config as GrpoConfig
from experiments.train_options import grpo_run
from specrl_jax.drafters.heads import init_head
from specrl_jax.errors import InputError
from specrl_jax.models.params import init_params
from specrl_jax.parallel.mesh import parse_mesh
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.training.pieces import Clock, StepPieces

SCRIPT = "bench_mesh"
COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)")


@dataclass(frozen=True)
class Config(GrpoConfig):
    """Options of the table: those of a GRPO run, and what is compared."""

    # --mesh asks for the devices, as many as the largest of them takes.
    meshes: tuple[str, ...] = ("data=8", "data=4,fsdp=2", "data=2,fsdp=2,tensor=2", "tensor=8")
    repeats: int = 5
    speculation: SpeculationFlags = SpeculationOptions(draft_length=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("", self, repeats=1)
        if self.speculation.adaptive:
            raise InputError("--draft-length is auto, whose steps differ from mesh to mesh; choose a number")
        if not self.meshes:
            raise InputError("--meshes must name at least one")


PRESETS: dict[str, Mapping[str, Any]] = {
    "cpu": {
        "mesh": "data=8",
        "shape": {"hidden_size": 128, "intermediate_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2},
        "prompts": 8,
        "samples": 4,
        "updates_per_rollout": 1,
        "microbatch": {"rows": 4, "widths": (1.0,)},
        "warmup": {"batch": 32},  # checked, not run
        "draft": {"batch": 32, "microbatch": {"rows": 2, "widths": (1.0,)}},
        "max_new_tokens": 64,
        "numerics": "plain",
    },
    "smoke": {
        **train_options.PRESETS["smoke"],
        "compare": False,
        "mesh": "data=2",
        "draft": {"microbatch": {"rows": 2, "widths": (1.0,)}},
        "meshes": ("data=2", "tensor=2"),
        "repeats": 1,
    },
}


class MeshStep:
    """Steps on one mesh, one per call, in pieces."""

    def __init__(self, config: GrpoConfig) -> None:
        session, _, _ = train_grpo.open_session(config)
        key = jax.random.key(config.run.seed)
        params = init_params(key, session.policy)
        head = init_head(key, train_grpo.as_head(session.drafter).config, params)
        draft = train_grpo.session_draft(session, head)
        self.program: GrpoProgram = session.program(session.draft_length)
        self._pieces = StepPieces(self.program)
        self._state = self.program.place(self.program.step.init(params, draft))

    def __call__(self) -> dict[str, float]:
        """Seconds of the pieces of a step."""
        clock = Clock()
        served = clock("time_weight_sync_s", self.program.gather, self._state)
        prompts, problems = self._pieces.issue(clock, served, 0)
        trajectory = clock("time_rollout_s", self.program.rollout, served, prompts)
        rewards = self._pieces.rewards(clock, served, problems, trajectory, None)
        self._state, _ = self._pieces.learn(clock, self._state, trajectory, rewards)
        return clock.seconds

    def rollout(self) -> Any:
        """A rollout alone."""
        served = self.program.gather(self._state)
        return self.program.rollout(served, self.program.issue(served)[0])


def traced_share(call: Any) -> float:
    """Share of collectives in the busy time of the devices while `call` runs; of nested operations the innermost."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        trace = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    busy = inside = 0.0
    for plane in trace.planes:
        for line in plane.lines:
            found = operations(line)
            busy += sum(end - start for start, end, _ in found)
            inside += sum(end - start for start, end, name in found if COLLECTIVE.search(name))
    return inside / busy if busy else float("nan")


def operations(line: Any) -> list[tuple[float, float, str]]:
    """Begin, end and name of the operations of a line of a trace that hold no others."""
    events = [
        (e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events if any(k == "hlo_op" for k, _ in e.stats)
    ]
    events.sort(key=lambda event: (event[0], -event[1]))
    following = [*events[1:], (np.inf, np.inf, "")][: len(events)]
    return [event for event, after in zip(events, following, strict=True) if after[0] >= event[1]]


def main(config: Config) -> None:
    """Time every mesh in turn, write and print."""
    config.check()
    check_output(config.run, SCRIPT)
    if config.policy or config.drafter or config.task != "arithmetic":
        raise InputError("bench_mesh makes its own policy, head and prompts; leave --policy, --drafter and --task out")
    steps = {mesh: MeshStep(grpo_run(config, mesh=mesh)) for mesh in config.meshes}
    out = open_output(config.run, config, SCRIPT)
    seconds: dict[str, list[dict[str, float]]] = {mesh: [] for mesh in steps}
    with progress("mesh", config.repeats + 1) as advance:
        for _ in range(config.repeats + 1):
            for mesh, step in steps.items():
                seconds[mesh].append(step())
            advance(1)
    rows = []
    for mesh, step in steps.items():
        own = seconds[mesh][1:]
        shares = [one["time_weight_sync_s"] / sum(one.values()) for one in own]
        row = {"mesh": str(parse_mesh(mesh)), "step_s": float(np.median([sum(one.values()) for one in own]))}
        row |= {"gather_share": float(np.median(shares)), "collectives_share": traced_share(step)}
        rows.append(row | {"rollout_collectives_share": traced_share(step.rollout), "steps": len(own)})
    write_results(out, rows, "Share of collectives", provenance(config.run.seed))
    print(markdown_table(rows), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
