#!/usr/bin/env bash
# Two hosts of eight GPUs under Slurm, a process per GPU: sbatch experiments/launch/slurm.sh
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --signal=TERM@120
srun .venv/bin/python -m experiments.train_grpo --coordinator auto --mesh data=2,fsdp=8 --policy "$POLICY" --drafter "$DRAFTER" \
    --task jsonl --data "$DATA" --out "$SHARED/run" "$@"
