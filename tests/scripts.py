"""Scripts run inside the test process, and small policy folders for them, whole and damaged."""

import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import equal_prices

from experiments import (
    acceptance_by_depth,
    acceptance_by_rule,
    acceptance_by_task,
    async_pipeline,
    bench_cache,
    bench_mesh,
    bench_peers,
    bench_rollout,
    bench_round_cost,
    bench_step,
    check_checkpoint,
    convert,
    draft_init,
    draft_length,
    draft_methods,
    evaluate,
    expand,
    generate,
    losslessness,
    noise_cost,
    online_adaptation,
    plan,
    train_draft,
    train_grpo,
)
from experiments.common import run_main
from specrl_jax.data.tokenizers import arithmetic_tokenizer
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_params import Eagle3Config, init_eagle3
from specrl_jax.drafters.heads import save_drafter
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.huggingface import save_policy
from specrl_jax.models.params import init_params
from specrl_jax.training import costs

POLICY = PolicyConfig(
    family="qwen3",
    vocab_size=len(arithmetic_tokenizer()),
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    tie_embeddings=True,
    max_position_embeddings=256,
)
HEAD = Eagle3Config(
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=POLICY.vocab_size,
    draft_vocab_size=POLICY.vocab_size,
    boundaries=(0, 1, 2),
    target_hidden_size=32,
)
jax.devices()  # no script may ask for more than conftest did
SMALLER = (replace(POLICY, hidden_size=16), replace(HEAD, hidden_size=16, target_hidden_size=16))
COMPILED = []
"""Names of the functions that were compiled."""


def _note_compiled(event, seconds, fun_name="", **_):
    # An array that is copied to a device, or converted, counts as compiled too.
    if event.endswith("backend_compile_duration") and fun_name not in ("jit(stage)", "jit(convert_element_type)"):
        COMPILED.append(fun_name)


jax.monitoring.register_event_duration_secs_listener(_note_compiled)


def run_script(monkeypatch, script, *argv):
    """What `python -m experiments.SCRIPT ARGV` does."""
    monkeypatch.setattr(costs, "_BUDGET_S", 0.0)  # nothing here goes by how long a round takes
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, argv)])
    run_main(script.main, script.Config, script.PRESETS)


def give_prices(monkeypatch):
    """Let all rounds cost alike instead of measuring them, for which every body is compiled once more."""

    def given(engine, params, draft, rows, context):
        return equal_prices(engine.config, rows)

    monkeypatch.setattr(costs, "measure_costs", given)


def refusal(monkeypatch, capsys, script, *argv):
    """The one sentence of stderr with which a script refuses its input before it compiles anything."""
    capsys.readouterr()
    COMPILED.clear()
    with pytest.raises(SystemExit) as stop:
        run_script(monkeypatch, script, *argv)
    assert stop.value.code == 2
    assert not COMPILED
    complaint = capsys.readouterr().err
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1
    assert complaint.endswith("\n")
    return complaint.removeprefix("error: ").rstrip("\n")


def write_models(folder, policy=POLICY, head=HEAD):
    """`folder`/policy, whose law is peaked and depends on the context, and `folder`/drafter, untrained."""
    params = init_params(jax.random.key(0), policy)
    params = params.replace(embed=params.embed * 10)
    save_policy(folder / "policy", params, policy, arithmetic_tokenizer())
    save_drafter(folder / "drafter", Eagle3Drafter(head), init_eagle3(jax.random.key(1), head, policy=params))
    return folder


def _edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _reshape(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((48, 31), np.float32)
    save_file(tensors, file, metadata={"format": "pt"})


def _grow_tokenizer(folder):
    tokenizer = arithmetic_tokenizer()
    tokenizer.add_tokens(["x"])
    tokenizer.save_pretrained(folder)


DAMAGES = {
    "missing weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "holds neither model.safetensors nor model.safetensors.index.json; save the policy there with safetensors",
    ),
    "truncated weights": (_truncate, r"model\.safetensors is damaged or incomplete at tensor \S+; download it again"),
    "wrong shape": (
        _reshape,
        r"tensor model\.layers\.1\.mlp\.up_proj\.weight of shape \[48, 31\] where config\.json asks for \[48, 32\]; ",
    ),
    "unknown architecture": (
        lambda folder: _edit_config(folder, architectures=["MambaForCausalLM"], model_type="mamba"),
        r"config\.json: policy config names the architecture 'MambaForCausalLM'; supported are Qwen3ForCausalLM, ",
    ),
    "tokenizer larger than the embedding": (
        _grow_tokenizer,
        "the tokenizer has ids up to 22 and the policy's embedding 22 rows; use the tokenizer that belongs",
    ),
    "missing config": (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing; give a folder"),
    "missing tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "holds no tokenizer; give a folder with a tokenizer.json",
    ),
}
"""What can be wrong with a policy's folder, and the sentence about it."""

SCRIPTS = {
    "train_grpo": train_grpo,
    "train_draft": train_draft,
    "generate": generate,
    "evaluate": evaluate,
    "losslessness": losslessness,
    "acceptance_by_rule": acceptance_by_rule,
    "acceptance_by_task": acceptance_by_task,
    "acceptance_by_depth": acceptance_by_depth,
    "noise_cost": noise_cost,
    "expand": expand,
    "convert": convert,
    "check_checkpoint": check_checkpoint,
    "draft_init": draft_init,
    "draft_length": draft_length,
    "draft_methods": draft_methods,
    "online_adaptation": online_adaptation,
    "async_pipeline": async_pipeline,
    "bench_round_cost": bench_round_cost,
    "bench_rollout": bench_rollout,
    "bench_peers": bench_peers,
    "bench_step": bench_step,
    "bench_cache": bench_cache,
    "bench_mesh": bench_mesh,
    "plan": plan,
}
