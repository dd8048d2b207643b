#!/usr/bin/env bash
# Trains Qwen2.5-32B by one of the paper's four methods: 4 node(s) of 8 H100-80GB. See docs/cluster.md.
#
#   bash examples/qwen2.5_32b/run.sh grpo|clip_higher|clip_cov|kl_cov [section.key=value ...]
set -euo pipefail
export NODES="${NODES:-4}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../paper_method.sh" examples/qwen2.5_32b "$@"
