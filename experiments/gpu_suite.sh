#!/usr/bin/env bash
# Everything that a new accelerator should show, in under 8 minutes on one GPU: parity with transformers,
# exactness of speculation, cost of a round, speed of rollouts and of GRPO steps.
#
#   experiments/gpu_suite.sh OUT          8B shape in bfloat16, expanded, 2,048 tokens of context (rounds: to 16,384)
#   experiments/gpu_suite.sh OUT toy      the same programs at toy size, on whatever is there
set -euo pipefail

out=${1:?usage: experiments/gpu_suite.sh OUT [toy]}
size=${2:-8b}
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
if [ -e "$out" ]; then
    echo "error: $out exists; name a new folder" >&2
    exit 1
fi
mkdir -p "$out"

# XLA may run a loop's body as one CUDA graph; the loops of a rollout are what it is for.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL"
export JAX_PLATFORMS=${JAX_PLATFORMS:-$($python -c 'import jax; print(jax.default_backend().replace("gpu", "cuda"))')}

if [ "$size" = toy ]; then
    shape=(--shape toy)
    rows=(1 2) contexts=(32) longer=(64) lengths=(3) repeats=3 tokens=16 survival=(0.877)
    trained=(--shape toy --tokens 8 --repeats 3 --kl-coefs 0)
else
    shape=(--shape "$size" --dtype bfloat16)
    rows=(1 32) contexts=(2048) longer=(8192 16384) lengths=(3) repeats=5 tokens=256 survival=(0.877)
    # Adam's moments of 8B parameters would leave no room for their step on one GPU.
    trained=(--shape 1.7b --dtype bfloat16 --repeats 5 --kl-coefs 0)
fi

failed=0

# Runs a step of its own; where one fails the others still tell what they find.
step() {
    printf '\n== %s (%ss)\n' "$1" "$SECONDS"
    shift
    "$@" || { echo "FAILED: $*"; failed=1; }
}

parity() {
    JAX_DISABLE_MOST_OPTIMIZATIONS=0 JAX_DEFAULT_MATMUL_PRECISION=highest XLA_PYTHON_CLIENT_PREALLOCATE=false \
        $python -m pytest -q -m ci tests/test_models_parity.py tests/test_gpu_attention.py -p no:cacheprovider \
        > "$out/parity.txt" 2>&1
    local status=$?
    tail -1 "$out/parity.txt"
    return $status
}

step "parity with transformers (float32, full precision)" parity

step "exactness: tokens with and without drafts" \
    $python -m experiments.losslessness --preset smoke --out "$out/losslessness"

step "cost of a round" \
    $python -m experiments.bench_round_cost "${shape[@]}" --rows "${rows[@]}" --contexts "${contexts[@]}" \
    --draft-lengths "${lengths[@]}" --no-parts --repeats "$repeats" --out "$out/round_cost"

step "rollouts of one row, from caches that are filled" \
    $python -m experiments.bench_rollout "${shape[@]}" --rows 1 --lengths equal --tokens "$tokens" \
    --context "${contexts[0]}" --survival "${survival[@]}" --draft-lengths 3 7 --no-floors --repeats "$repeats" \
    --out "$out/rollout"

step "GRPO steps" $python -m experiments.bench_step "${trained[@]}" --out "$out/step"

# Last, so that nothing else is lost where time runs out.
step "cost of a round of one row in longer contexts" \
    $python -m experiments.bench_round_cost "${shape[@]}" --rows 1 --contexts "${longer[@]}" \
    --draft-lengths "${lengths[@]}" --no-parts --repeats "$repeats" --out "$out/round_cost_longer"

printf '\n== done (%ss)\n' "$SECONDS"
exit $failed
