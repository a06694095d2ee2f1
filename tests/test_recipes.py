"""Every recipe takes two steps at reduced width, from folders like those it names."""

import dataclasses
import importlib
import json
import pkgutil

import pytest
from public_folders import write_folder
from scripts import run_script

from experiments import plan, recipes, train_grpo
from experiments.common import preset_config
from experiments.train_options import Config
from specrl_jax.data.tokenizers import train_bpe
from specrl_jax.parallel.mesh import parse_mesh
from specrl_jax.training.metrics import read_metrics

RECIPES = sorted(m.name for m in pkgutil.iter_modules(recipes.__path__) if m.name != "common")


def recipe(name):
    return importlib.import_module(f"experiments.recipes.{name}")


def write_task(file, count):
    """Rows as DAPO-Math-17k has them."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {i} + {i + 1}? The last line is Answer: and the number."}],
            "reward_model": {"ground_truth": str(2 * i + 1)},
        }
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.ci
@pytest.mark.parametrize("name", RECIPES)
def test_presets_can_be_read_and_say_what_they_take(name):
    module = recipe(name)
    for preset in module.PRESETS:
        config = preset_config(Config, module.PRESETS, preset, script=train_grpo.SCRIPT)
        config.check()
        assert config.prompts % config.updates_per_rollout == 0
        dataclasses.asdict(config)
    text = module.__doc__
    assert f"python -m experiments.recipes.{name}" in text
    assert "Memory" in text
    assert "Expected" in text
    assert "not measured" in text


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "preset", "planned"),
    [
        ("qwen3_8b_rl_think", "eagle3", {"model": "qwen3-8b"}),
        ("qwen3_8b_base_rl_zero", "eagle3", {"model": "qwen3-8b"}),
        ("qwen3_8b_rl_think", "block", {"model": "qwen3-8b", "head": "block", "draft_length": 7, "rows": 12}),
        ("qwen3_8b_base_rl_zero", "block", {"model": "qwen3-8b", "head": "block", "draft_length": 7, "rows": 12}),
        ("qwen3_0_6b_gsm8k", "eagle3", {"preset": "0.6b"}),
    ],
)
def test_plans_are_of_the_recipes(name, preset, planned):
    """What the plan of a recipe compiles has the sizes of the recipe, but for the controller's draft lengths."""
    module, changes = recipe(name), dict(planned)
    config = preset_config(Config, module.PRESETS, preset, script=train_grpo.SCRIPT)
    plans = preset_config(plan.Config, plan.PRESETS, changes.pop("preset", "8b"), script=plan.SCRIPT)
    assert plans.model == changes.pop("model", plans.model) == config.policy.split("/")[1].lower().removesuffix("-base")
    sizes, context = dataclasses.replace(plans.sizes, **changes), config.max_prompt_tokens + config.max_new_tokens
    assert parse_mesh(plans.mesh) == parse_mesh(config.mesh)
    assert sizes.context == context
    assert sizes.prompt_tokens == config.max_prompt_tokens
    assert sizes.microbatch_tokens == config.microbatch.rows * context
    assert sizes.rows * parse_mesh(config.mesh).tensor == config.rows
    assert (sizes.prompts, sizes.samples) == (config.prompts, config.samples)
    assert sizes.draft_microbatches == config.draft.online_microbatches
    assert (sizes.draft_sequences, sizes.draft_rows) == (config.draft.online_sequences, config.draft.microbatch.rows)
    assert sizes.unroll == config.draft.unroll
    if not config.speculation.adaptive:
        assert sizes.draft_length == config.speculation.draft_length


REDUCED = [(name, preset) for name in RECIPES for preset in recipe(name).PRESETS if preset.startswith("reduced")]


@pytest.mark.full
@pytest.mark.parametrize(("name", "preset"), REDUCED)
def test_two_steps_at_reduced_width(tmp_path, monkeypatch, name, preset):
    module = recipe(name)
    made = {"Qwen3-8B-Base": "Qwen3-8B"}  # of the same layout
    named = module.PRESETS[preset]["policy"].split("/")[1]
    policy = write_folder(tmp_path / "policy", made.get(named, named))
    lines = write_task(tmp_path / "train.jsonl", 12).read_text().splitlines()
    texts = [json.loads(line)["prompt"][0]["content"] for line in lines]
    train_bpe(texts, 300).save_pretrained(policy)
    head = "Qwen3-8B-DFlash-b16" if preset == "reduced_block" else module.PRESETS[preset].get("drafter", "")
    models = ["--policy", policy]
    if head:
        models += ["--drafter", write_folder(tmp_path / "head", head.split("/")[-1])]
    data = ["--data", tmp_path / "train.jsonl", "--eval-data", write_task(tmp_path / "test.jsonl", 6)]
    module.main, module.Config = train_grpo.main, Config
    extra = ["--layout", "dapo"] if name.endswith("gsm8k") else []
    run_script(
        monkeypatch, module, "--preset", preset, *models, *data, *extra, "--data-split", "train",
        "--eval-split", "test", "--out", tmp_path / "run",
    )  # fmt: skip
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "reward_mean" in row] == [1, 2]
    assert all(row["draft_loss"] > 0 for row in rows if "draft_loss" in row)
    assert (tmp_path / "run" / "policy" / "model.safetensors").is_file()
