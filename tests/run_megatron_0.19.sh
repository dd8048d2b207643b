#!/usr/bin/env bash
# Runs the short form of the parity suite with megatron-core 0.19.2.
#
# The second environment sees all packages of the first one behind its own, so that only megatron-core and, where torch
# did not bring it, triton are installed anew. pip refuses this megatron-core on Python 3.11 although it runs there.
#
# MEGARL_VENV_019  the second environment's folder (default: the first one's name with -megatron-0.19 appended)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=
version=0.19.2

first="$(bash tools/make_environment.sh dev,report,sglang)"
second="${MEGARL_VENV_019:-$first-megatron-0.19}"
packages="$("$first/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
wanted="$version $packages"
stamp="$second/.megarl.stamp"

if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$wanted" ]]; then
    echo "== making $second with megatron-core $version"
    "$first/bin/python" -m venv "$second"
    install() { "$second/bin/python" -m pip install -qq --disable-pip-version-check --no-deps "$@"; }
    install --ignore-requires-python "megatron-core==$version"
    own="$("$second/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "import site; site.addsitedir('$packages')" > "$own/first_environment.pth"
    "$second/bin/python" -c 'import triton' 2>/dev/null || install triton
    echo "$wanted" > "$stamp"
fi

"$second/bin/python" - "$version" <<'CHECK'
import importlib.metadata, sys
found = importlib.metadata.version("megatron-core")
sys.exit(0 if found == sys.argv[1] else f"megatron-core {found} is found in place of {sys.argv[1]}")
CHECK
echo "== parity with megatron-core $version"
exec "$second/bin/python" -m pytest tests/distributed/test_parity.py -k short "$@"
