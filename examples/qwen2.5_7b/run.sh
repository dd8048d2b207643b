#!/usr/bin/env bash
# Trains Qwen2.5-7B by one of the paper's four methods: 1 node(s) of 8 H100-80GB. See docs/cluster.md.
#
#   bash examples/qwen2.5_7b/run.sh grpo|clip_higher|clip_cov|kl_cov [section.key=value ...]
#
# The environment variables of examples/launch.sh say on how many nodes, and whether in Docker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

methods=(grpo clip_higher clip_cov kl_cov)
method="${1:-}"
if [[ ! " ${methods[*]} " == *" $method "* || -z "$method" ]]; then
    echo "usage: bash examples/qwen2.5_7b/run.sh grpo|clip_higher|clip_cov|kl_cov [section.key=value ...]" >&2
    exit 2
fi
shift
exec bash examples/launch.sh "examples/qwen2.5_7b/$method.yaml" "$@"
