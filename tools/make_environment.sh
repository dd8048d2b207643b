#!/usr/bin/env bash
# Makes the virtual environment that examples/quickstart/run.sh and tests/run.sh use; prints its folder.
#
#   bash tools/make_environment.sh [EXTRAS]      EXTRAS: extras of pyproject.toml, default dev,report
#
# MEGARL_VENV    the environment's folder (default: .venv in the repository)
# MEGARL_PYTHON  the Python to make it with (default: the first of python3.11, python3, python3.12, python3.13 that fits)
# MEGARL_TORCH   what pip installs where torch is missing (default: torch==2.13.0)
#
# A second call with nothing changed returns at once.
set -euo pipefail

extras="${1:-dev,report}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${MEGARL_VENV:-$root/.venv}"
torch="${MEGARL_TORCH:-torch==2.13.0}"

say() { echo "make_environment: $*" >&2; }

find_python() {
    local candidate
    for candidate in ${MEGARL_PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "error: no Python >= 3.11 with venv and pip found; install it (on Debian: python3-venv) or set MEGARL_PYTHON"
    return 1
}

install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@" >&2; }

# What the installation depends on; a stamp of it says that nothing is left to do.
wanted="$(cat "$root/pyproject.toml" "$root/tools/tested_versions.txt" <(echo "$root $extras $torch") | cksum)"
stamp="$venv/.megarl-$extras.stamp"
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
say "installing megarl[$extras]"
install --constraint "$root/tools/tested_versions.txt" --editable "${root}[$extras]"
echo "$wanted" > "$stamp"
say "done in $((SECONDS - began)) s"
echo "$venv"
