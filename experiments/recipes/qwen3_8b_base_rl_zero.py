"""Qwen3-8B-Base from zero on DAPO-Math-17k, judged by AIME-2024, on eight GPUs.

    python -m experiments.recipes.qwen3_8b_base_rl_zero   # an EAGLE-3 head from the policy's own answers
    python -m experiments.recipes.qwen3_8b_base_rl_zero --preset block --drafter FOLDER   # or your block drafter

No public head was made for the base policy, so the run first trains one on the policy's responses to prompts of the run
(the initialisation that NVIDIA found best), for 2,048 prompts of 4 responses. A block drafter for it comes from
`python -m experiments.train_draft --policy Qwen/Qwen3-8B-Base --task jsonl --data BytedTsinghua-SIA/DAPO-Math-17k
--head.kind block`.

Memory: that of `qwen3_8b_rl_think`, whose shapes it shares; the first training of the head and dynamic sampling are not
planned. Not measured on GPUs.

Disk: a checkpoint holds weights, float32 masters and both moments, about 115 GB, and four of them must fit.

Expected, not measured here: NVIDIA's run (arXiv 2604.26779) had an acceptance length of 3.32 at k = 3, rollouts 1.77
times and steps 1.41 times as fast, and the accuracy of the run without drafts; a head from chat data 1.51 times.
"""

from collections.abc import Mapping
from typing import Any

from experiments import train_grpo
from experiments.common import run_main
from experiments.recipes.common import DAPO, REDUCED, merged
from experiments.train_options import Config

EAGLE3 = merged(
    DAPO,
    {
        "policy": "Qwen/Qwen3-8B-Base",
        "draft": {"prompts": 2048, "samples": 4, "steps": 1000, "batch": 16, "vocab_size": 32_000},
    },
)
BLOCK = merged(EAGLE3, {"speculation": {"draft_length": 7}, "rows": 48})
PRESETS: dict[str, Mapping[str, Any]] = {
    "eagle3": EAGLE3,
    "block": BLOCK,
    "reduced": merged(EAGLE3, REDUCED),
    "reduced_block": merged(BLOCK, REDUCED),
}

if __name__ == "__main__":
    run_main(train_grpo.main, Config, PRESETS, script="recipes.qwen3_8b_base_rl_zero", description=__doc__)
