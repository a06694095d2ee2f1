"""Qwen3-8B in thinking mode on DAPO-Math-17k, judged by AIME-2024, on eight GPUs.

    python -m experiments.recipes.qwen3_8b_rl_think                    # a public EAGLE-3 head, trained on as it drafts
    python -m experiments.recipes.qwen3_8b_rl_think --preset block     # a public DFlash block drafter instead

Memory, compiled for eight devices at 16,384 tokens and two sequences in a microbatch (`python -m experiments.plan
--model qwen3-8b --devices 8 --context 16384`; README): a step fits 80 GB with an EAGLE-3 head and 16 live rows per
device, or with a block drafter, whose own cache has five layers, and 12 (`--head block --draft-length 7 --rows 12`).
Dynamic sampling is not planned. Not measured on GPUs.

Disk: a checkpoint holds weights, float32 masters and both moments, about 115 GB, and four of them must fit.

Expected, not measured here: NVIDIA's run of this policy and data on 32 GB200 (arXiv 2604.26779) had an acceptance
length of 2.77 at k = 3, rollouts 1.54 times and steps 1.35 times as fast, and the accuracy of the run without drafts.
For a DFlash drafter trained along, arXiv 2609.07108 reports 3.45 and steps 1.88 times as fast at another setting.
Check policy and EAGLE-3 head first: `python -m experiments.check_checkpoint --policy Qwen/Qwen3-8B --drafter ...`.
"""

from collections.abc import Mapping
from typing import Any

from experiments import train_grpo
from experiments.common import run_main
from experiments.recipes.common import DAPO, REDUCED, merged
from experiments.train_options import Config

EAGLE3 = merged(DAPO, {"policy": "Qwen/Qwen3-8B", "drafter": "RedHatAI/Qwen3-8B-speculator.eagle3"})
BLOCK = merged(EAGLE3, {"drafter": "z-lab/Qwen3-8B-DFlash-b16", "speculation": {"draft_length": 7}, "rows": 48})
PRESETS: dict[str, Mapping[str, Any]] = {
    "eagle3": EAGLE3,
    "block": BLOCK,
    "reduced": merged(EAGLE3, REDUCED),
    "reduced_block": merged(BLOCK, REDUCED),
}

if __name__ == "__main__":
    run_main(train_grpo.main, Config, PRESETS, script="recipes.qwen3_8b_rl_think", description=__doc__)
