"""What the recipes share: the settings of DAPO, and the sizes of a trial run."""

from collections.abc import Mapping
from typing import Any

from specrl_jax.rl.microbatches import geometric_widths

DAPO: dict[str, Any] = {
    "task": "jsonl",
    "data": "BytedTsinghua-SIA/DAPO-Math-17k",
    "eval_data": "BytedTsinghua-SIA/AIME-2024",
    "eval_split": "train",
    "dtype": "bfloat16",
    "numerics": "plain",
    "mesh": "data=1,fsdp=2,tensor=4",
    "remat": True,
    "prompts": 64,
    "samples": 16,
    "rows": 64,
    "scan_steps": 1,
    "updates_per_rollout": 1,
    "max_prompt_tokens": 1024,
    "max_new_tokens": 15_360,
    "loss": {"clip_low": 0.2, "clip_high": 0.28},
    "normalize_std": True,
    "overlong_buffer": 4096,
    "dynamic_sampling": 3,
    "optimizer": {
        "learning_rate": 1e-6,
        "name": "adamw",
        "schedule": "constant",
        "warmup_steps": 10,
        "weight_decay": 0.1,
        "adam_learning_rate": None,
    },
    "microbatch": {"rows": 2, "widths": geometric_widths(0.1, 10)},
    "speculation": {"draft_length": 3},
    "draft": {
        "online_sequences": 1,
        "online_microbatches": 8,
        "online_optimizer": {"learning_rate": 1e-4},
        "microbatch": {"rows": 1, "widths": (0.25, 0.5, 1.0)},
        "tolerance": 0.05,
    },
    "steps": 200,
    "measured_every": 1,
    "eval_problems": 30,
    "eval_every": 10,
}
"""DAPO (arXiv 2503.14476) on its mathematics, with k = 3 as in NVIDIA's run (arXiv 2604.26779), which does not tell its
other settings: 64 prompts of 16 responses, learning rate 1e-6 after 10 steps, weight decay 0.1, no KL penalty and token
mean are those of its first author's public code. The context is shorter than DAPO's 20,480."""

REDUCED: dict[str, Any] = {
    "mesh": "data=1,fsdp=2,tensor=1",
    "prompts": 4,
    "samples": 4,
    "rows": 4,
    "max_prompt_tokens": 256,
    "max_new_tokens": 32,
    "overlong_buffer": 8,
    "microbatch": {"rows": 4, "widths": (0.5, 1.0)},
    "draft": {
        "prompts": 4,
        "samples": 2,
        "steps": 2,
        "batch": 4,
        "vocab_size": 128,
        "online_microbatches": 1,
        "microbatch": {"rows": 1, "widths": (1.0,)},
        "tolerance": 0.0,
    },
    "steps": 2,
    "eval_problems": 2,
    "eval_every": 2,
}


def merged(*presets: Mapping[str, Any]) -> dict[str, Any]:
    """Presets one over the other; nested ones field by field."""
    result: dict[str, Any] = {}
    for preset in presets:
        for name, value in preset.items():
            old = result.get(name)
            result[name] = merged(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return result
