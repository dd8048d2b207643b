#!/usr/bin/env bash
# Makes a virtual environment in which the real SGLang server runs on a CPU; prints its folder.
#
#   bash tools/install_sglang_cpu.sh [VENV]
#
# VENV                  the environment's folder (default: MEGARL_SGLANG_VENV, then .venv-sglang in the repository)
# MEGARL_SGLANG_PYTHON  the Python to make it with (default: python3.11, then python3)
# MEGARL_SGLANG_TORCH   what pip installs where torch is missing (default: torch==2.13.0, a CPU build)
#
# SGLang's pins differ from the trainer's, so it has an environment of its own: give its python to
# rollout.server_python. A second call with nothing changed returns at once. About 1.7 GB.
# On GPUs install SGLang as its own documentation says; this script is for CPUs.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
parts="$root/tools/sglang_cpu"
venv="${1:-${MEGARL_SGLANG_VENV:-$root/.venv-sglang}}"
torch="${MEGARL_SGLANG_TORCH:-torch==2.13.0}"

say() { echo "install_sglang_cpu: $*" >&2; }

find_python() {
    local candidate
    for candidate in ${MEGARL_SGLANG_PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "error: no Python from 3.10 to 3.12 with venv and pip found; install it or set MEGARL_SGLANG_PYTHON"
    return 1
}

install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@" >&2; }

# What the installation depends on; a stamp of it says that nothing is left to do.
wanted="$(cat "$parts"/*.txt "$parts"/*.py "$parts"/sgl_kernel/*.py <(echo "$torch") | cksum)"
stamp="$venv/.megarl-sglang.stamp"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    echo "$venv"
    exit
fi

began=$SECONDS
if [[ ! -x "$venv/bin/python" ]]; then
    python="$(find_python)"
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    say "installing $torch"
    install "$torch"
fi
say "installing sglang"
install --no-warn-conflicts --no-deps --requirement "$parts/without_dependencies.txt"
install --no-warn-conflicts --requirement "$parts/requirements.txt"

site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
if [[ -n "$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "")')" ]]; then
    say "error: $venv holds a CUDA torch; this script is for CPUs"
    exit 1
fi
mkdir -p "$site/sgl_kernel"
cp "$parts/sgl_kernel/__init__.py" "$site/sgl_kernel/__init__.py"
cp "$parts/sglang_on_cpu.py" "$site/sglang_on_cpu.py"
echo "import sglang_on_cpu" > "$site/sglang_on_cpu.pth"

"$venv/bin/python" -c 'import sglang.launch_server' >&2 || { say "error: sglang does not import"; exit 1; }
echo "$wanted" > "$stamp"
say "done in $((SECONDS - began)) s"
echo "$venv"
