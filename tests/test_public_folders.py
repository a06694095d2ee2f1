"""Folders as public checkpoints come: they load without a word, draft, and agree at full size in names and shapes."""

import re

import jax
import numpy as np
import pytest
from public_folders import FOLDERS, QWEN3_8B, write_folder
from tiny import PLAIN, keys_of, tiny_prompts

from specrl_jax.drafters import head_files
from specrl_jax.drafters.heads import for_policy, load_drafter
from specrl_jax.errors import InputError
from specrl_jax.models import weights
from specrl_jax.models.huggingface import load_config, load_policy
from specrl_jax.models.huggingface_config import config_from_hf
from specrl_jax.models.presets import PRESETS
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw

pytestmark = pytest.mark.ci
POLICY_OF = {
    "Qwen3-8B_eagle3": "Qwen3-8B",
    "Qwen3-8B-speculator.eagle3": "Qwen3-8B",
    "Qwen3-8B-DFlash-b16": "Qwen3-8B",
    "MiMo-7B-RL": "MiMo-7B-RL",
}
POLICIES = {*POLICY_OF.values(), "Qwen3-0.6B"}
FLAGS = {"Qwen3-8B_eagle3": False, "Qwen3-8B-speculator.eagle3": True}


@pytest.mark.parametrize("name", POLICY_OF)
def test_a_small_one_loads_without_a_word_and_drafts(tmp_path, capfd, name):
    """Warnings would be errors."""
    params, policy = load_policy(write_folder(tmp_path / "policy", POLICY_OF[name]), "float32")
    head = tmp_path / "policy" if name == POLICY_OF[name] else write_folder(tmp_path / "head", name)
    drafter, draft = for_policy(*load_drafter(head, policy), params)
    assert capfd.readouterr() == ("", "")
    if name in FLAGS:
        assert drafter.config.norm_before_residual == FLAGS[name]
        assert drafter.boundaries == (2, 3, 4)
        np.testing.assert_array_equal(draft.target_ids, 2 * np.arange(96))
        assert (draft.embed is not None) == FLAGS[name]
    prompts, samples = tiny_prompts(2), 2
    engine = RolloutEngine(
        policy,
        RolloutConfig(8, samples, 2, SamplingLaw(end_ids=(policy.vocab_size - 1,)), ladder=(1.0,)),
        PLAIN,
        drafter,
    )
    trajectory = jax.jit(engine.rollout)(params, draft, prompts, keys_of(prompts, samples))
    np.testing.assert_array_equal(trajectory.lengths, 8)
    assert trajectory.stats.rounds > 0
    assert np.isfinite(trajectory.log_probs).all()


class ReachedError(Exception):
    """All checks are passed, and the first tensor would be read."""


@pytest.fixture
def read_nothing(monkeypatch):
    def reach(*_, **__):
        raise ReachedError

    monkeypatch.setattr(weights, "_read", reach)
    monkeypatch.setattr(head_files, "safe_open", reach)


def load(folder, name):
    if name not in POLICIES:
        return load_drafter(folder, config_from_hf(QWEN3_8B))
    return load_policy(folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_names_and_shapes_agree_at_full_size(tmp_path, read_nothing, name):
    folder = write_folder(tmp_path / "whole", name, full=True)
    with pytest.raises(ReachedError):
        load(folder, name)
    if name == "MiMo-7B-RL":  # its head, in the same folder
        with pytest.raises(ReachedError):
            load_drafter(folder, load_config(folder))
    files = list(folder.glob("*.safetensors"))
    apparent, real = (sum(get(file.stat()) for file in files) for get in (lambda s: s.st_size, lambda s: s.st_blocks))
    assert apparent > 0.7e9
    assert 512 * real < 1e7


@pytest.mark.parametrize("name", FOLDERS)
def test_one_row_too_many_is_seen_at_full_size(tmp_path, read_nothing, name):
    def grow(shapes):
        shapes[spoilt] = (shapes[spoilt][0] + 1, *shapes[spoilt][1:])

    hf, shapes_of, _ = FOLDERS[name]
    spoilt = next(t for t in ("lm_head.weight", "fc.weight", "model.embed_tokens.weight") if t in shapes_of(hf))
    folder = write_folder(tmp_path / "spoilt", name, full=True, change=grow)
    with pytest.raises(InputError, match=rf"{re.escape(spoilt)} of shape"):
        load(folder, name)


def test_the_shapes_are_those_of_the_presets():
    for name, preset in (("Qwen3-8B", "qwen3-8b"), ("Qwen3-0.6B", "qwen3-0.6b"), ("MiMo-7B-RL", "mimo-7b")):
        hf, shapes_of, _ = FOLDERS[name]
        config = PRESETS[preset]
        assert config_from_hf(hf) == config
        ours = weights.tensor_shapes(config)
        assert ours == {tensor: shape for tensor, shape in shapes_of(hf).items() if ".mtp_layers." not in tensor}
