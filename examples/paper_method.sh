#!/usr/bin/env bash
# Trains a model of the paper's section 4 by one of its four methods, from the presets of a folder. See docs/cluster.md.
#
#   bash examples/paper_method.sh FOLDER grpo|clip_higher|clip_cov|kl_cov [section.key=value ...]
#
# The environment variables of examples/launch.sh say on how many nodes, and whether in Docker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

methods=(grpo clip_higher clip_cov kl_cov)
folder="${1:-}" method="${2:-}"
if [[ -z "$method" || ! " ${methods[*]} " == *" $method "* ]]; then
    echo "usage: bash ${folder:-FOLDER}/run.sh grpo|clip_higher|clip_cov|kl_cov [section.key=value ...]" >&2
    exit 2
fi
shift 2
exec bash examples/launch.sh "$folder/$method.yaml" "$@"
