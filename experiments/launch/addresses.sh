#!/usr/bin/env bash
# Any machines that reach each other, a process on each; on host I of N: experiments/launch/addresses.sh FIRST_HOST:1234 N I
coordinator=$1 processes=$2 process=$3
shift 3
.venv/bin/python -m experiments.train_grpo --coordinator "$coordinator" --processes "$processes" --process "$process" \
    --policy "$POLICY" --drafter "$DRAFTER" --task jsonl --data "$DATA" --out "$SHARED/run" "$@"
