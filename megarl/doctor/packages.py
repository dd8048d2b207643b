"""Python packages and programs: which are there, in which version."""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

from megarl.doctor.finding import Finding

SECONDS = 60.0  # that another interpreter may take to answer
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# package of the metadata, module to find, what its lack costs
OPTIONAL = (
    ("triton", "triton", "no fused kernels of the head: log-probs and entropies by plain torch, slower on GPUs"),
    (
        "transformer-engine",
        "transformer_engine",
        "GPUs: no packed sequences, context parallelism or FP8; with apex precision.layers=local trains, slower; "
        "with neither no training on GPUs (pip install 'megarl[cuda]')",
    ),
    (
        "apex",
        "apex",
        "nothing where Transformer Engine is there; with neither there is no fused Adam, so no training on GPUs",
    ),
    ("aiohttp", "aiohttp", "rollout.engine=sglang does not work (pip install 'megarl[sglang]')"),
    ("altair", "altair", "megarl report does not work (pip install 'megarl[report]')"),
    ("pyseccomp", "pyseccomp", "programs cannot be judged in the sandbox (pip install 'megarl[code]')"),
    ("reasoning-gym", "reasoning_gym", "reward.function=reasoning_gym does not work (pip install 'megarl[data]')"),
)
# Compiled against one torch and one CUDA: that it is installed does not say that it can be imported.
COMPILED = {"transformer-engine": "transformer_engine.pytorch"}


def python_finding() -> Finding:
    """The interpreter."""
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    return Finding("python", "ok" if good else "missing", version, "" if good else "megarl needs 3.11", needed=True)


def cpu_path_findings() -> list[Finding]:
    """What a run on a CPU needs, each really imported; the last one is megarl's own loop with Megatron."""
    findings = []
    for package, module in (
        ("torch", "torch"),
        ("megatron-core", "megatron.core"),
        ("transformers", "transformers"),
        ("math-verify", "math_verify"),
        ("megarl", "megarl.train"),
    ):
        if package == "megatron-core":  # whose import needs megarl's preparation of the CPU
            module = "megarl.policy.mcore"
        problem = import_problem(module)
        if problem:
            findings.append(Finding(package, "missing", problem, "no run works without it", needed=True))
        else:
            findings.append(Finding(package, "ok", version_of(package), needed=True))
    return findings


def import_problem(module: str) -> str:
    """What keeps a module from being imported, in one line; empty when nothing does."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever it is, the user has to be told
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def version_of(package: str) -> str:
    """The installed version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of a source folder"


def optional_findings() -> list[Finding]:
    """Packages without which something else works."""
    findings = []
    for package, module, cost in OPTIONAL:
        if importlib.util.find_spec(module) is None:
            findings.append(Finding(package, "missing", "", cost))
        elif package in COMPILED and (problem := import_problem(COMPILED[package])):
            findings.append(Finding(package, "missing", f"{version_of(package)}, {problem}", cost))
        else:
            findings.append(Finding(package, "ok", version_of(package)))
    return findings


def sglang_finding(python: str) -> Finding:
    """SGLang in the interpreter that starts servers."""
    program = "import json, importlib.metadata as m; print(json.dumps(m.version('sglang')))"
    cost = (
        "rollout.engine=sglang cannot start servers; rollout.urls and in_process work (rollout.server_python names it)"
    )
    found = shutil.which(python)
    if found is None:
        return Finding("sglang", "missing", f"{python} is no executable file", cost)
    try:
        answer = subprocess.run([found, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding("sglang", "missing", f"{python} did not answer in {SECONDS:.0f} s", cost)
    if answer.returncode != 0:
        return Finding("sglang", "missing", f"not in {python}", cost)
    return Finding("sglang", "ok", f"{json.loads(answer.stdout)} in {python}")


def sandbox_finding() -> Finding:
    """bubblewrap, really asked to make a namespace, and libseccomp."""
    cost = "reward.function=code refuses, unless reward.sandbox=process or remote (bash tools/install_sandbox.sh)"
    program = shutil.which("bwrap")
    if program is None:
        return Finding("bubblewrap", "missing", "no bwrap", cost)
    if ctypes.util.find_library("seccomp") is None:
        return Finding("bubblewrap", "missing", "no libseccomp", cost)
    command = [program, "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "true"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding("bubblewrap", "missing", f"made no namespace in {SECONDS:.0f} s", cost)
    if tried.returncode != 0:
        return Finding("bubblewrap", "missing", f"makes no namespace here: {tried.stderr.strip()[:200]}", cost)
    return Finding("bubblewrap", "ok", _first_line([program, "--version"]))


def browser_finding() -> Finding:
    """A browser, which only tests use."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        return Finding("chromium", "missing", "", "the tests of report pages skip; reports open in any browser")
    return Finding("chromium", "ok", path)


def _first_line(command: Sequence[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return (answer.stdout or answer.stderr).strip().splitlines()[0][:100]
