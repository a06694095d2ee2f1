"""Plans of memory: what the compiler says against shapes, against what a process takes, and at the size of Qwen3-8B."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import array_shapes
from scripts import refusal, run_script

from experiments import plan
from experiments.abstract_run import AbstractStep, Sizes, abstract_step
from experiments.common import parse_config
from experiments.compiled_memory import float32_copies
from specrl_jax.models.backend import made_for
from specrl_jax.models.cache import init_pool
from specrl_jax.models.huggingface_config import config_to_hf
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.presets import PRESETS
from specrl_jax.parallel.mesh import make_mesh, parse_mesh

ci, full = pytest.mark.ci, pytest.mark.full
EIGHT = "data=1,fsdp=2,tensor=4"


@ci
def test_bad_input_is_refused(monkeypatch, capsys, tmp_path):
    def refused(words, *argv):
        assert words in refusal(monkeypatch, capsys, plan, "--preset", "smoke", "--out", tmp_path / "run", *argv)
        assert not (tmp_path / "run").exists()

    refused("--target is gpu; choose here, or a TPU slice", "--target", "gpu")
    refused("--context is 1; it must be at least 2", "--context", 1)
    refused("leave room for a response", "--prompt-tokens", 64)
    refused("less than a sequence of 64; raise it", "--microbatch-tokens", 60)
    refused("exceed the policy's max_position_embeddings of 1024", "--context", 1025,
            "--microbatch-tokens", 2050)  # fmt: skip
    refused("mesh axis tensor is 3 and does not divide", "--mesh", "tensor=3")
    refused("3 prompts per step do not split over 2 devices", "--prompts", 3)
    refused("--measure runs on this machine", "--measure", "--target", "v5p:2x2x2")
    refused("--devices is 0; it must be at least 1", "--devices", 0)
    refused("--mesh data=2 takes 2 devices and --devices is 4; leave one out", "--devices", 4, "--mesh", "data=2")
    refused("--draft-rows is 2, of 1 sequences that are left", "--draft-rows", 2)
    refused("config.json is missing", "--model", tmp_path)


@ci
def test_what_a_compiler_refuses_is_one_sentence(monkeypatch, capsys, tmp_path):
    def refuse(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM, 31.34G exceeds 15.75G.\nMore")

    monkeypatch.setattr(AbstractStep, "rehearse", refuse)
    said = refusal(monkeypatch, capsys, plan, "--preset", "smoke", "--out", tmp_path / "run")
    assert (
        said
        == "--target here: Ran out of memory on HBM, 31.34G exceeds 15.75G; choose a larger slice, or smaller sizes"
    )
    assert not (tmp_path / "run").exists()


@ci
@pytest.mark.parametrize(
    ("argv", "mesh"),
    [
        ((), EIGHT),
        (("--devices", "1"), "data=1,fsdp=1,tensor=1"),
        (("--devices", "6"), "data=1,fsdp=3,tensor=2"),
        (("--devices", "16"), "data=1,fsdp=4,tensor=4"),
        (("--mesh", "data=2,fsdp=8"), "data=2,fsdp=8"),
        (("--preset", "0.6b"), "data=1"),
        (("--preset", "0.6b", "--devices", "8"), EIGHT),
    ],
)
def test_devices_are_those_asked_for(argv, mesh):
    assert parse_config(plan.Config, plan.PRESETS, argv, script=plan.SCRIPT).mesh == mesh


@ci
def test_a_small_plan_adds_up(monkeypatch, tmp_path, capsys):
    run_script(monkeypatch, plan, "--preset", "smoke", "--out", tmp_path / "run")
    rows = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["program"] for row in rows] == ["rollout", "policy update", "draft update"]
    for row in rows:
        assert row["compiled by"] == "cpu (cpu)"
        parts = ("arguments", "new results", "temporaries", "state beside")
        assert math.isclose(row["total"], sum(row[part] for part in parts), rel_tol=1e-6)
        assert row["fits"] == "H100, H200, GB200, v5p, v6e"
    parts = json.loads((tmp_path / "run" / "summary.json").read_text())["parts"]
    update = rows[1]
    # The state is stored once, whichever part of it a program takes.
    assert math.isclose(update["state beside"] + update["arguments"], parts["state"], rel_tol=0.1)
    assert "every program fits 70 GiB" in capsys.readouterr().out


@ci
def test_advice_names_the_largest_part_and_its_remedy():
    row = {"program": "rollout", "needed": 97.8}
    parts = dict.fromkeys(plan.PARTS["rollout"], 4.0) | {"cache": 35.0, "inputs of layers": 90.0}
    said = plan.advice(row, parts, 70.0)
    assert said.startswith("rollout needs 97.8 GiB, above 70; its largest part is cache with 35.0: fewer --rows")


@ci
def test_float32_copies_are_those_that_the_program_does_not_have():
    traced = "tensor<4x8192x4096xbf16> tensor<8192x8192xf32>"
    compiled = """
      %a = bf16[4,8192,4096]{2,1,0} parameter(0)
      %b = f32[4,8192,4096]{2,1,0} convert(%a)
      %c = bf16[4096,8192]{1,0} parameter(1)
      %d = f32[4096,8192]{1,0} convert(%c)
      %e = bf16[16,16]{1,0} parameter(2)
      %f = f32[16,16]{1,0} convert(%e)
    """
    assert float32_copies(traced, compiled) == {"f32[4, 8192, 4096]": 4 * 4 * 8192 * 4096}


@ci
def test_a_plan_for_a_tpu_has_the_pages_of_a_tpu():
    sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "pages": 3}

    def pages():
        pool = jax.eval_shape(lambda: init_pool(**sizes, dtype=jnp.bfloat16, numerics=Numerics("plain")))
        return {x.dtype.name for x in jax.tree.leaves(pool)}

    assert pages() == {"uint16"}
    with made_for("tpu"):
        assert pages() == {"bfloat16"}
    assert pages() == {"uint16"}


def eight_billion(layers=36, **sizes):
    policy = dataclasses.replace(PRESETS["qwen3-8b"], num_layers=layers)
    return abstract_step(policy, make_mesh(parse_mesh(EIGHT)), Sizes(**sizes))


def traced(step):
    """What is computed from a trajectory on, as functions and shapes of their arguments: log-probs of the old policy
    and of a reference, the policy's update, the head's."""
    update = dataclasses.replace(step.program.step.update_config, recompute_logprobs=True)
    program = dataclasses.replace(step.program, step=dataclasses.replace(step.program.step, update_config=update))
    state = dataclasses.replace(step.state, reference=step.state.params)
    trajectory = jax.eval_shape(lambda: program.step.engine.empty_batch(tokens_of(step)).trajectory)
    rewards = jax.ShapeDtypeStruct(trajectory.lengths.shape, np.float32)
    prepared = jax.eval_shape(program.prepare, state, trajectory)
    learn = program.to_update(state, trajectory, prepared, rewards)
    after, _, examples = jax.eval_shape(program.compiled_update, *learn)
    teach = program.to_update_drafter(program.after_update(state, after), trajectory, examples)
    return {
        "log-probs": (program.prepare, (state, trajectory)),
        "update": (program.compiled_update, learn),
        "draft update": (program.compiled_draft_update, teach),
    }


def tokens_of(step):
    """Prompts of nothing, for shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), step.prompts)


def laws_of(step, fn, args):
    """Shapes with a vocabulary's axis that are no parameter's."""
    vocabularies = {step.program.step.engine.policy.vocab_size, step.head.draft_vocab_size}
    weights = {x.shape for x in jax.tree.leaves((step.state.params, step.state.draft))}
    weights |= {shape[::-1] for shape in weights}
    shapes = {shape for shape in array_shapes(fn, *args) if vocabularies & set(shape)}
    return {shape for shape in shapes if math.prod(shape) > max(vocabularies)} - weights


@ci
@pytest.mark.parametrize("head", ["eagle3", "block"])
def test_no_array_of_an_8b_step_exceeds_a_chunk_of_laws(head):
    """At 16,384 tokens and 32,768 in a microbatch, policy and head."""
    step = eight_billion(4, head=head)
    vocab = step.program.step.engine.policy.vocab_size
    for name, (fn, args) in traced(step).items():
        found = laws_of(step, fn, args)
        assert found, name  # laws there are
        assert max(map(math.prod, found)) <= 1024 * vocab, (name, found)


@ci
def test_laws_of_a_whole_microbatch_are_noticed():
    """A positive control: with all tokens in one chunk the same search finds their laws."""
    step = eight_billion(2)
    scorer = dataclasses.replace(step.program.step.scorer, chunk=2**20)
    program = dataclasses.replace(step.program, step=dataclasses.replace(step.program.step, scorer=scorer))
    step = dataclasses.replace(step, program=program)
    fn, args = traced(step)["update"]
    assert max(map(math.prod, laws_of(step, fn, args))) >= 32_768 * step.program.step.engine.policy.vocab_size


def planned(folder, *options):
    """Rows of a plan as users compile it."""
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "experiments.plan", "--out", str(folder), *map(str, options)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return json.loads((folder / "results.json").read_text())["rows"]


@full
def test_8b_compiles_for_eight_devices_below_70_gib(tmp_path):
    """By the CPU's compiler, its own float32 copies and all; it compiles for minutes."""
    rows = planned(tmp_path / "run", "--model", "qwen3-8b", "--devices", 8, "--context", 16_384)
    for row in rows:
        assert row["compiled by"] == "cpu (cpu)"
        assert row["total"] < 70.0, row
    copies = json.loads((tmp_path / "run" / "summary.json").read_text())["float32_copies"]
    for row in rows:
        listed = copies.get(row["program"], {})
        assert listed, row["program"]
        assert all(shape.startswith("f32[") for shape in listed)
        assert math.isclose(row["needed"], row["total"] - sum(listed.values()), rel_tol=1e-6)


@full
def test_a_plan_is_within_a_tenth_of_what_a_process_takes(tmp_path):
    policy = dataclasses.replace(
        PRESETS["tiny-qwen3"], vocab_size=32_768, hidden_size=1024, intermediate_size=3072, num_layers=12,
        num_heads=16, num_kv_heads=8, head_dim=64, tie_embeddings=False,
    )  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_to_hf(policy)))
    sizes = {"context": 128, "prompt-tokens": 64, "microbatch-tokens": 1024, "rows": 16, "prompts": 4, "samples": 4,
             "draft-vocab": 16_384, "draft-microbatches": 2}  # fmt: skip
    options = [text for name, value in sizes.items() for text in (f"--{name}", value)]
    rows = planned(tmp_path / "run", "--model", tmp_path / "model", "--mesh", "data=1", "--measure", *options)
    apart = {row["program"]: row["measured"] / row["total"] - 1 for row in rows}
    assert all(abs(share) < 0.1 for share in apart.values()), apart
