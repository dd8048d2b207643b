"""Launch scripts, the Slurm job and the images: what is started, and that linters find nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from megarl.sweep.config import load_sweep, members_of
from megarl.sweep.scripts import write_scripts

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([
    *ROOT.glob("examples/**/*.sh"), *ROOT.glob("examples/**/*.sbatch"), *ROOT.glob("tools/*.sh"),
    *ROOT.glob("tests/*.sh"), ROOT / ".ci" / "run",
])  # fmt: skip
CLEAN = {name: value for name, value in os.environ.items() if name not in ("NODES", "HEAD", "IMAGE", "RUN_ID")}


def command(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", script, *arguments], cwd=ROOT, env=CLEAN | environment, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip


def launched(*arguments: str, **environment: str) -> list[str]:
    answer = command("examples/launch.sh", "--print", *arguments, **environment)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


def test_one_node_bare() -> None:
    words = launched("examples/qwen2.5_7b/grpo.yaml", "loop.steps=3")
    assert words[0] == "torchrun" and "--standalone" in words and "--nnodes" not in words
    assert words[words.index("--nproc-per-node") + 1] == "8"
    assert words[words.index("--signals-to-handle") + 1] == "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    assert words[-4:] == ["-m", "megarl.train", "examples/qwen2.5_7b/grpo.yaml", "loop.steps=3"]


def test_many_nodes_in_docker() -> None:
    words = launched(
        "examples/qwen2.5_32b/kl_cov.yaml", NODES="4", HEAD="node-7", IMAGE="megarl:1", MOUNTS="/models:/data",
        NCCL_IB_HCA="mlx5", CUDA_VISIBLE_DEVICES="4,5,6,7",
    )  # fmt: skip
    image = words.index("megarl:1")
    container, run = words[:image], words[image + 1 :]
    assert container[:2] == ["docker", "run"] and {"--gpus", "--ipc=host", "--network=host", "--init"} <= set(container)
    for option in (
        ["--volume", "/models:/models"], ["--volume", "/data:/data"], ["--env", "NCCL_IB_HCA"],
        ["--env", "CUDA_VISIBLE_DEVICES"],
    ):  # fmt: skip
        assert any(container[place : place + 2] == option for place in range(len(container)))
    assert run[0] == "torchrun" and run[run.index("--nnodes") + 1] == "4"
    assert run[run.index("--rdzv-endpoint") + 1] == "node-7:29500" and run[run.index("--rdzv-id") + 1] == "kl_cov"
    assert run[-1] == "rollout.server_python=/opt/sglang/bin/python"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "usage:"),
        (["absent.yaml"], {}, "config file absent.yaml does not exist"),
        (["examples/qwen2.5_7b/grpo.yaml"], {"NODES": "2"}, "NODES = 2 needs HEAD"),
        (["examples/qwen2.5_7b/grpo.yaml"], {"NODES": "two"}, "must be positive numbers"),
        (["examples/qwen2.5_7b/grpo.yaml"], {"GPUS_PER_NODE": "0"}, "must be positive numbers"),
    ],
)
def test_a_bad_start_is_refused(arguments: list[str], environment: dict[str, str], message: str) -> None:
    answer = command("examples/launch.sh", "--print", *arguments, **environment)
    assert answer.returncode == 2 and message in answer.stderr


@pytest.mark.parametrize("size", ["7b", "32b"])
def test_a_method_that_is_not_there_is_refused(size: str) -> None:
    for arguments in ([], ["ppo"], ["grpo clip_cov"]):
        answer = command(f"examples/qwen2.5_{size}/run.sh", *arguments)
        assert answer.returncode == 2 and "grpo|clip_higher|clip_cov|kl_cov" in answer.stderr


def stand_ins(folder: Path, run: str) -> dict[str, str]:
    """An environment whose `srun` is the given shell code, and whose `scontrol` writes down what it is asked."""
    (folder / "srun").write_text(f'#!/usr/bin/env bash\necho "$@" > {folder}/srun.log\n{run}\n')
    names = (  # of so many nodes that no pipe holds them all
        "#!/usr/bin/env bash\n"
        f'if [[ $1 == show ]]; then echo node-1; seq 30000; else echo "$@" >> {folder}/requeued; fi\n'
    )
    (folder / "scontrol").write_text(names)
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    return CLEAN | {
        "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12345", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node-[1-2]",
    }  # fmt: skip


def slurm_job(folder: Path, run: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "examples/slurm/train.sbatch", "examples/qwen2.5_32b/grpo.yaml"],
        cwd=ROOT, env=stand_ins(folder, run), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_slurm_job_saves_and_goes_back_into_the_queue(tmp_path: Path) -> None:
    saves = (
        f"trap 'sleep 0.3; touch {tmp_path}/saved; exit 1' USR1; touch {tmp_path}/runs; while true; do sleep 0.05; done"
    )
    job = slurm_job(tmp_path, saves)
    try:
        while not (tmp_path / "runs").exists():
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.02)
        job.send_signal(10)  # SIGUSR1, as Slurm sends to the batch shell
        output = job.communicate(timeout=240)[0]
    finally:
        job.kill()
    assert job.returncode == 0 and (tmp_path / "saved").exists(), output
    assert (tmp_path / "requeued").read_text() == "requeue 12345\n"


@pytest.mark.parametrize("code", [0, 1])
def test_a_slurm_job_that_ends_by_itself_is_not_started_again(tmp_path: Path, code: int) -> None:
    job = slurm_job(tmp_path, f'echo "$NODES $HEAD $GPUS_PER_NODE $RUN_ID $PORT" > {tmp_path}/seen; exit {code}')
    job.communicate(timeout=240)
    assert job.returncode == code and not (tmp_path / "requeued").exists()
    assert (tmp_path / "seen").read_text().split() == ["2", "node-1", "8", "12345-0", "22345"]
    assert "bash examples/launch.sh examples/qwen2.5_32b/grpo.yaml" in (tmp_path / "srun.log").read_text()


def test_the_quick_start_leaves_gpus_alone() -> None:
    """With one in sight its float32 model would be refused: Transformer Engine takes bfloat16."""
    text = (ROOT / "examples/quickstart/run.sh").read_text()
    assert re.search(r"^export .*\bCUDA_VISIBLE_DEVICES=$", text, flags=re.MULTILINE)
    assert text.index("CUDA_VISIBLE_DEVICES=") < text.index("torchrun")


def test_no_script_kills_by_name_or_names_a_host() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert not re.search(r"\b(pkill|killall|kill -9)\b", text), script
        assert not re.search(r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", text), script


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    assert len(SCRIPTS) > 8
    sweep = load_sweep(ROOT / "examples" / "scaling_law" / "cluster.yaml", str(tmp_path / "sweep"))
    written = write_scripts(sweep, Path("sweep.yaml"), members_of(sweep))
    answer = subprocess.run(
        [program("shellcheck"), *map(str, [*SCRIPTS, *written[:3]])],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout


def program(name: str) -> str:
    """A linter of the extra `dev`."""
    import sys

    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    assert found, f"{name} is not installed: pip install 'megarl[dev]'"
    return found


def test_hadolint_finds_nothing() -> None:
    files = [str(ROOT / "docker" / name) for name in ("Dockerfile", "Dockerfile.cpu")]
    answer = subprocess.run(
        [program("hadolint"), "--config", str(ROOT / "docker" / "hadolint.yaml"), *files],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && sudo pip install torch\n")
    answer = subprocess.run(
        [program("hadolint"), "--config", str(ROOT / "docker" / "hadolint.yaml"), str(tmp_path / "Dockerfile")],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert answer.returncode == 1 and "DL3004" in answer.stdout


def instructions(name: str) -> list[str]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "docker" / name).read_text(), flags=re.MULTILINE)
    return [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_cpu_image_does_the_test_suites_steps() -> None:
    """What tests/run.sh and .ci/run call, in the same words and order, and the suite itself at the end."""
    called = re.findall(
        r"bash (tools/\S+\.sh[^\n\")]*)", (ROOT / ".ci/run").read_text() + (ROOT / "tests/run.sh").read_text()
    )
    text = "\n".join(instructions("Dockerfile.cpu"))
    places = [text.index(f"bash {step.strip()}") for step in called]
    assert len(called) == 3 and places == sorted(places)
    assert 'CMD ["bash", "tests/run.sh"]' in text


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_images_run_as_a_user_and_know_their_health(name: str) -> None:
    lines = instructions(name)
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER ${USER_ID}"] and lines[-1].startswith("CMD")
    assert any(line.startswith("HEALTHCHECK") and '"megarl", "doctor"' in line for line in lines)
    assert not any(re.search(r"https?://|\.(io|com|org)\b", line) for line in lines)


def test_the_images_versions_are_within_the_projects_ranges() -> None:
    import tomllib

    from packaging.requirements import Requirement

    pins = dict(re.findall(r"ARG (\w+)=([\d.]+)$", "\n".join(instructions("Dockerfile")), flags=re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    ranges = {Requirement(line).name: Requirement(line).specifier for line in stated}
    for package in ("torch", "megatron-core", "transformer-engine"):
        assert ranges[package].contains(pins[package.upper().replace("-", "_")]), package
    assert f"sglang {pins['SGLANG']}" in (ROOT / "docs" / "rollouts.md").read_text()
