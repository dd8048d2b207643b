#!/usr/bin/env bash
# Starts or resumes a run on this node, alone or as one of several, in Docker or bare. Give the same command on each node.
#
#   bash examples/launch.sh [--print] CONFIG.yaml [section.key=value ...]
#
# --print        only show the command, one word a line
#
# NODES          nodes of the run (default 1); more than one need HEAD
# HEAD           a host of the run that all nodes reach: where they meet
# PORT           port there (default 29500)
# RUN_ID         name of this start, the same on all nodes (default: the config's name)
# GPUS_PER_NODE  training processes on each node (default 8)
# IMAGE          run in this Docker image; unset: bare, in the environment that is active
# MOUNTS         more folders for the container, separated by colons (models, data); the working directory is always there
# SERVER_PYTHON  the Python that has sglang (default: MEGARL_SERVER_PYTHON; in Docker the image's own)
#
# SIGTERM and SIGUSR1 save and end the run; the same command goes on with it.
set -euo pipefail

show=false
if [[ "${1:-}" == --print ]]; then
    show=true
    shift
fi
if [[ $# -lt 1 ]]; then
    echo "usage: bash examples/launch.sh [--print] CONFIG.yaml [section.key=value ...]" >&2
    exit 2
fi
config="$1"
shift
if [[ ! -f "$config" ]]; then
    echo "launch: error: config file $config does not exist" >&2
    exit 2
fi
nodes="${NODES:-1}"
if [[ ! "$nodes" =~ ^[1-9][0-9]*$ || ! "${GPUS_PER_NODE:-8}" =~ ^[1-9][0-9]*$ ]]; then
    echo "launch: error: NODES = $nodes and GPUS_PER_NODE = ${GPUS_PER_NODE:-8} must be positive numbers" >&2
    exit 2
fi
if [[ $nodes -gt 1 && -z "${HEAD:-}" ]]; then
    echo "launch: error: NODES = $nodes needs HEAD, a host of the run that all nodes reach" >&2
    exit 2
fi

# A run that is asked to stop ends what it generates or its updates, and saves: torchrun must wait for that, and pass SIGUSR1 on.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-1800}"
# Megatron orders communication before computation by a single queue to the GPU.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false

signals="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
command=(torchrun --signals-to-handle "$signals" --nproc-per-node "${GPUS_PER_NODE:-8}")
if [[ $nodes -gt 1 ]]; then
    command+=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}")
    command+=(--rdzv-id "${RUN_ID:-$(basename "$config" .yaml)}")
else
    command+=(--standalone)
fi
server_python="${SERVER_PYTHON:-${MEGARL_SERVER_PYTHON:-}}"
if [[ -n "${IMAGE:-}" ]]; then
    server_python="${SERVER_PYTHON:-/opt/sglang/bin/python}"
fi
command+=(-m megarl.train "$config")
if [[ -n "$server_python" ]]; then
    command+=("rollout.server_python=$server_python")
fi
command+=("$@")

if [[ -n "${IMAGE:-}" ]]; then
    container=(docker run --rm --init --gpus all --ipc=host --network=host)
    container+=(--ulimit memlock=-1 --ulimit stack=67108864 --stop-timeout "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    container+=(--user "$(id -u):$(id -g)" --volume "$PWD:$PWD" --workdir "$PWD")
    if [[ -d /dev/infiniband ]]; then
        container+=(--device /dev/infiniband)
    fi
    IFS=: read -r -a mounts <<< "${MOUNTS:-}"
    for mount in "${mounts[@]}"; do
        container+=(--volume "$mount:$mount")
    done
    for name in TORCH_ELASTIC_SHUTDOWN_TIMEOUT CUDA_DEVICE_MAX_CONNECTIONS OMP_NUM_THREADS TOKENIZERS_PARALLELISM; do
        container+=(--env "$name")
    done
    while IFS= read -r name; do # which GPUs are this run's, and what the site sets for its network
        container+=(--env "$name")
    done < <(compgen -e | grep -E '^(CUDA_VISIBLE_DEVICES$|(NCCL|GLOO|UCX)_)' || true)
    command=("${container[@]}" "$IMAGE" "${command[@]}")
fi

if $show; then
    printf '%s\n' "${command[@]}"
    exit
fi
exec "${command[@]}"
