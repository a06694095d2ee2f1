"""What a GRPO run of a large policy takes of every device's memory, before any device is there.

The pieces of a step (rollout, policy update, draft update) are compiled ahead of time for a mesh, from shapes, and
the compiler says what each takes; what of the run's state lies beside a piece is counted with it. `--target` names who
compiles: that of the devices here, virtual ones on a CPU, or, where libtpu is installed, the compiler of TPUs for a
slice such as v5p:2x2x2 (no TPU is needed). A CPU multiplies bfloat16 in float32: the float32 copies that only it makes
are listed, each once, and left out of `needed`, which is low by what of them does not exist at the same time.
`--model` is a preset, or a folder or hub name of which only config.json is read:

    python -m experiments.plan --model qwen3-8b --devices 8 --context 16384
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import jax
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh

from experiments.abstract_run import AbstractStep, Sizes, abstract_step
from experiments.common import Run, RunOptions, run_main
from experiments.compiled_memory import memory_of
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from specrl_jax.errors import InputError
from specrl_jax.models.backend import made_for
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import load_config, resolve_folder
from specrl_jax.models.presets import PRESETS as POLICIES
from specrl_jax.parallel.mesh import make_mesh, mesh_over, parse_mesh
from specrl_jax.training.metrics import write_json
from specrl_jax.training.pieces import Rehearsed

SCRIPT = "plan"
GIB = 2**30
DEVICES = {"H100": 70.0, "H200": 126.0, "GB200": 165.0, "v5p": 90.0, "v6e": 29.5}
"""GiB that a program may take of 80, 141 and 186 GB (NVIDIA), 95 and 32 GiB (TPU): the rest is the runtime's, the
collectives' and what falls between blocks."""
PIECES = {"time_rollout_s": "rollout", "time_update_s": "policy update", "time_draft_update_s": "draft update"}
PARTS = {
    "rollout": ("state", "weights as rollouts and gradients read them", "cache", "drafter's cache"),
    "policy update": (
        "state",
        "weights as rollouts and gradients read them",
        "sum of gradients",
        "inputs of layers",
        "examples for the head",
    ),
    "draft update": ("state", "examples for the head"),
}
REMEDIES = {
    "state": "split it over more devices, along fsdp or tensor",
    "weights as rollouts and gradients read them": "a larger tensor axis; fsdp does not split them",
    "sum of gradients": "a larger tensor axis; fsdp does not split it",
    "inputs of layers": "fewer tokens in a microbatch (--microbatch-tokens), or a shorter --context",
    "cache": "fewer --rows at a time; other sequences wait",
    "drafter's cache": "fewer --rows at a time; other sequences wait",
    "examples for the head": "fewer --draft-microbatches",
}


@dataclass(frozen=True)
class Config:
    """Options of a plan."""

    run: Run = RunOptions()
    model: str = "qwen3-8b"
    """A preset, or a folder or hub name of a policy."""
    target: str = "here"
    """Who compiles: here, for the devices that jax sees, or the compiler of a TPU slice such as v5p:2x2x2."""
    devices: int | None = None
    """Of one mesh, of which tensor takes up to four and fsdp the rest."""
    axes: Annotated[str, tyro.conf.arg(name="mesh")] = ""
    """The mesh itself, in place of --devices."""
    usual: tyro.conf.Suppress[str] = "data=1,fsdp=2,tensor=4"
    """The mesh of the preset."""
    measure: bool = False
    """Run the pieces once, with random weights, and put memory and seconds beside the plan; --mesh must be there."""
    room: float = DEVICES["H100"]
    """GiB per device above which advice is given."""
    sizes: Annotated[Sizes, tyro.conf.arg(name="")] = field(default_factory=Sizes)

    def __post_init__(self) -> None:
        if self.devices is not None and self.devices < 1:
            raise InputError(f"--devices is {self.devices}; it must be at least 1")
        if self.axes and self.devices not in (None, size := parse_mesh(self.axes).size):
            raise InputError(f"--mesh {self.axes} takes {size} devices and --devices is {self.devices}; leave one out")
        if self.target != "here" and ":" not in self.target:
            raise InputError(f"--target is {self.target}; choose here, or a TPU slice such as v5p:2x2x2")
        if self.measure and self.target != "here":
            raise InputError(f"--measure runs on this machine, not on --target {self.target}; leave one of them out")

    @property
    def mesh(self) -> str:
        """Devices that are compiled for."""
        return self.axes or (self.usual if self.devices is None else mesh_for(self.devices))


def mesh_for(devices: int) -> str:
    """So many devices with state split over all of them, and weights in use over four: the reach of most links."""
    tensor = next(size for size in (4, 2, 1) if devices % size == 0)
    return f"data=1,fsdp={devices // tensor},tensor={tensor}"


PRESETS: dict[str, Mapping[str, Any]] = {
    "8b": {},
    "0.6b": {
        "model": "qwen3-0.6b",
        "usual": "data=1",
        "sizes": {
            "context": 1280,
            "prompt_tokens": 256,
            "microbatch_tokens": 10_240,
            "rows": 256,
            "prompts": 32,
            "draft_microbatches": 16,
            "draft_sequences": 2,
            "draft_rows": 8,
        },
    },
    "smoke": {
        "model": "tiny-qwen3",
        "usual": "data=1,fsdp=2,tensor=1",
        "sizes": {
            "context": 64,
            "prompt_tokens": 16,
            "microbatch_tokens": 128,
            "rows": 4,
            "prompts": 4,
            "samples": 2,
            "draft_vocab": 128,
            "draft_microbatches": 1,
        },
    },
}


def policy_of(model: str) -> PolicyConfig:
    """Shape of a preset, or of a folder or hub name."""
    return POLICIES[model] if model in POLICIES else load_config(resolve_folder(model))


def mesh_of(config: Config) -> Mesh:
    """The devices that are compiled for; none of them need exist for a TPU, or on a CPU."""
    axes = parse_mesh(config.mesh)
    if config.target == "here":
        return make_mesh(axes)
    # Nobody is to be asked where this machine's TPUs are.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=config.target).devices
    except Exception as error:  # jax raises what the plugin raises
        first = str(error).splitlines()[0]
        raise InputError(
            f"--target {config.target}: no TPU compiler for it ({first}); install the libtpu that this jax asks for, "
            "or leave --target out"
        ) from None
    if len(devices) != axes.size:
        raise InputError(
            f"--target {config.target} has {len(devices)} devices and mesh {axes} takes {axes.size}; choose a "
            "mesh of that many"
        )
    return mesh_over(axes, devices)


def row_of(piece: str, program: Rehearsed, step: AbstractStep, on_cpu: bool) -> dict[str, Any]:
    """Memory of a program per device in GiB, with what of the training's state lies beside it."""
    memory = memory_of(program, on_cpu=on_cpu)
    beside = step.beside(piece)
    row: dict[str, Any] = {
        "program": PIECES[piece],
        "arguments": memory.arguments / GIB,
        "new results": (memory.results - memory.overwritten) / GIB,
        "temporaries": memory.temporaries / GIB,
        "state beside": beside / GIB,
        "total": (memory.total + beside) / GIB,
    }
    row["needed"] = row["total"]
    if on_cpu:
        row["copies"] = {shape: size / GIB for shape, size in memory.copies.items()}
        row["needed"] -= sum(row["copies"].values())
    return row | {"fits": ", ".join(name for name, room in DEVICES.items() if row["needed"] <= room) or "none"}


def advice(row: Mapping[str, Any], parts: Mapping[str, float], room: float) -> str:
    """What to change about a program that takes more than `room`, by the largest part that it has."""
    part = max(PARTS[row["program"]], key=lambda part: parts[part])
    return (
        f"{row['program']} needs {row['needed']:.1f} GiB, above {room:g}; its largest part is {part} with "
        f"{parts[part]:.1f}: {REMEDIES[part]}"
    )


def compiled(step: AbstractStep, target: str) -> dict[str, Rehearsed]:
    """The programs; InputError where the compiler of TPUs refuses one that does not fit."""
    try:
        return step.rehearse()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = str(error).partition("RESOURCE_EXHAUSTED: ")[2].splitlines()[0].rstrip(".")
        raise InputError(f"--target {target}: {said}; choose a larger slice, or smaller sizes") from None


def main(config: Config) -> None:
    """Compile, write and print."""
    check_output(config.run, SCRIPT)
    step = abstract_step(policy_of(config.model), mesh_of(config), config.sizes)
    device = step.program.mesh.devices.flat[0]
    with made_for(device.platform):
        programs = compiled(step, config.target)
    out = open_output(config.run, config, SCRIPT)
    rows = [row_of(piece, programs[piece], step, device.platform == "cpu") for piece in PIECES]
    parts = {name: size / GIB for name, size in step.parts.items()}
    hints = [advice(row, parts, config.room) for row in rows if row["needed"] > config.room]
    compiler = f"{device.platform} ({device.device_kind})"
    shown = [{k: v for k, v in row.items() if k != "copies"} | {"compiled by": compiler} for row in rows]
    print(markdown_table(shown), flush=True)
    if config.measure:
        taken, devices = step.measure(config.run.seed), step.program.mesh.size
        for piece, row in zip(PIECES, shown, strict=True):
            row |= {"measured": taken[piece].bytes / devices / GIB, "seconds": taken[piece].seconds}
        print(markdown_table(shown), flush=True)
    write_results(out, shown, f"GiB per device: {config.model}, {config.mesh}", provenance(config.run.seed))
    copies = {row["program"]: row["copies"] for row in rows if row.get("copies")}
    write_json(out / "summary.json", {"parts": parts, "float32_copies": copies, "advice": hints})
    print(markdown_table([{"part": name, "GiB per device": size} for name, size in parts.items()]))
    for program, found in copies.items():
        listed = ", ".join(f"{shape} {size:.2f}" for shape, size in found.items())
        print(f"{program}: float32 copies that only a CPU makes, in the total but not needed elsewhere: {listed}")
    print("\n".join(hints) or f"every program fits {config.room:g} GiB", flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
