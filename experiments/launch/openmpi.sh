#!/usr/bin/env bash
# Two hosts of eight GPUs under Open MPI, a process per GPU: experiments/launch/openmpi.sh host1:8,host2:8
hosts=$1
shift
mpirun --host "$hosts" -np 16 -x POLICY -x DRAFTER -x DATA -x SHARED sh -c '.venv/bin/python -m experiments.train_grpo \
    --coordinator auto --mesh data=2,fsdp=8 --policy "$POLICY" --drafter "$DRAFTER" --task jsonl --data "$DATA" \
    --out "$SHARED/run" "$@"' run "$@"
