#!/usr/bin/env bash
# From nothing to the entropy collapse and its cure, on a CPU: makes the environment, a base model, trains it with GRPO
# and with Clip-Cov, and compares the runs in a table and a picture.
#
#   bash examples/quickstart/run.sh [--all]      --all: KL-Cov and clip-higher as well
#
# QUICKSTART_DIR  where everything goes (default: runs/quickstart)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

methods=(grpo clip_cov)
case "${1:-}" in
    "") ;;
    --all) methods+=(kl_cov clip_higher) ;;
    *)
        echo "usage: bash examples/quickstart/run.sh [--all]" >&2
        exit 2
        ;;
esac

# Two ranks on two cores: one thread each, and waiting threads sleep. A GPU that may be there is left alone.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

venv="$(bash tools/make_environment.sh dev,report)"
export PATH="$venv/bin:$PATH"
out="${QUICKSTART_DIR:-runs/quickstart}"
mkdir -p "$out/configs"

train() { # MODULE NAME: one program on two ranks, with the paths of its config below $out; an earlier run there goes
    echo "== $2"
    sed "s#runs/quickstart#$out#g" "examples/quickstart/$2.yaml" > "$out/configs/$2.yaml"
    torchrun --standalone --nproc-per-node 2 -m "$1" "$out/configs/$2.yaml" run.overwrite=true
}

began=$SECONDS
echo "== data and start model"
python -m megarl.data.generated --out "$out/data"
python examples/quickstart/make_model.py --out "$out/start"
train megarl.sft sft
for method in "${methods[@]}"; do
    train megarl.train "$method"
done
echo "== comparison"
python examples/quickstart/compare.py "${methods[@]/#/$out/}" --out "$out"
echo "Quick start done in $((SECONDS - began)) s"
