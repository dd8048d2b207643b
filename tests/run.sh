#!/usr/bin/env bash
# Makes the environment and runs the whole suite, fast groups first; stops at the first group that fails.
#
#   bash tests/run.sh [PYTEST ARGUMENTS]      e.g. -k fit, -x; they go to each group of tests
#
# Ends with pytest's summary line of each group.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Ranks share the cores of one machine: one thread each, and waiting threads sleep.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
# The tests are written for CPUs, also where there are GPUs.
export CUDA_VISIBLE_DEVICES=

venv="$(bash tools/make_environment.sh dev,report,sglang,code,data)"
MEGARL_SGLANG_VENV="$(bash tools/install_sglang_cpu.sh)"
export MEGARL_SGLANG_VENV
export PATH="$venv/bin:$PATH"

summaries="$(mktemp)"
output="$(mktemp)"
trap 'rm -f "$summaries" "$output"' EXIT
durations=()
# The fast group alone runs as two processes: the others' tests start processes of their own, one a core.
declare -A options=([unit]="--numprocesses 2 --dist worksteal")

finish() { # NAME STARTED
    durations+=("$1 $((SECONDS - $2)) s")
}

lint() {
    local started=$SECONDS
    echo "== lint"
    ruff check .
    ruff format --check .
    mypy
    python tools/write_config_reference.py --check
    shellcheck .ci/run tests/*.sh tools/*.sh examples/*.sh examples/*/*.sh examples/slurm/*.sbatch
    hadolint --config docker/hadolint.yaml docker/Dockerfile docker/Dockerfile.cpu
    finish lint "$started"
}

tests() { # GROUP [PYTEST ARGUMENTS]
    local group="$1" started=$SECONDS status=0
    shift
    echo "== $group"
    # shellcheck disable=SC2086 # several words
    python -m pytest "tests/$group" --durations=5 ${options[$group]:-} "$@" 2>&1 | tee "$output" || status=$?
    # 5: no test matched, which only a selection by arguments excuses.
    if [[ $status -ne 0 && ! ($status -eq 5 && $# -gt 0) ]]; then
        echo "== $group failed after $((SECONDS - started)) s" >&2
        exit "$status"
    fi
    echo "$group: $(grep -E '[0-9]+ (passed|skipped|deselected)|no tests ran' "$output" | tail -n 1)" >> "$summaries"
    finish "$group" "$started"
}

lint
tests unit "$@"
tests servers "$@"
tests distributed "$@"
tests e2e "$@"
tests sglang "$@"

echo "== durations: $(printf '%s; ' "${durations[@]}")"
cat "$summaries"
