"""Qwen3-0.6B on GSM8K, on one GPU.

    python -m experiments.recipes.qwen3_0_6b_gsm8k

Memory: `python -m experiments.plan --preset 0.6b` compiles its pieces for one device, without the controller's further
draft lengths. Not measured on a GPU; a step of this shape on a CPU, at small sizes, is in README.

Expected: not measured. The head is trained on the policy's own answers before the run; small policies gain least from
drafts, since a draft step costs more of a policy step.
"""

from collections.abc import Mapping
from typing import Any

from experiments import train_grpo
from experiments.common import run_main
from experiments.recipes.common import REDUCED, merged
from experiments.train_options import Config
from specrl_jax.rl.microbatches import geometric_widths

EAGLE3: dict[str, Any] = {
    "policy": "Qwen/Qwen3-0.6B",
    "task": "jsonl",
    "data": "openai/gsm8k",
    "subset": "main",
    "eval_data": "openai/gsm8k",
    "dtype": "bfloat16",
    "numerics": "plain",
    "mesh": "data=1",
    "remat": True,
    "prompts": 32,
    "samples": 16,
    "rows": 256,
    "scan_steps": 1,
    "updates_per_rollout": 1,
    "max_prompt_tokens": 256,
    "max_new_tokens": 1024,
    "loss": {"clip_low": 0.2, "clip_high": 0.28},
    "optimizer": {
        "learning_rate": 2e-6,
        "name": "adamw",
        "schedule": "constant",
        "warmup_steps": 5,
        "adam_learning_rate": None,
    },
    "microbatch": {"rows": 8, "widths": geometric_widths(0.15, 8)},
    "speculation": {"draft_length": "auto"},
    "draft": {
        "prompts": 1024,
        "samples": 4,
        "steps": 500,
        "batch": 32,
        "microbatch": {"rows": 8, "widths": (0.25, 0.5, 1.0)},
        "online_microbatches": 16,
        "online_optimizer": {"learning_rate": 1e-4},
    },
    "steps": 100,
    "measured_every": 1,
    "eval_problems": 512,
    "eval_every": 10,
}
PRESETS: dict[str, Mapping[str, Any]] = {
    "eagle3": EAGLE3,
    "reduced": merged(EAGLE3, REDUCED, {"mesh": "data=2", "overlong_buffer": 0}),
}

if __name__ == "__main__":
    run_main(train_grpo.main, Config, PRESETS, script="recipes.qwen3_0_6b_gsm8k", description=__doc__)
