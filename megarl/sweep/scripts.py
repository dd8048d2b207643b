"""Launch scripts of a sweep: one shell script of all members, and a Slurm array per model size."""

from __future__ import annotations

import shlex
from pathlib import Path

from megarl.sweep.config import Member, SizeSection, SlurmSection, SweepConfig


def launch_command(member: Member, python: str = "python", *overrides: str) -> list[str]:
    """The command that runs or resumes a member on this machine."""
    module = ["-m", "megarl.train", str(member.config_path), *overrides]
    if member.size.processes == 1 and member.size.nodes == 1:
        return [python, *module]
    return [
        python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(member.size.processes), *module,
    ]  # fmt: skip


def write_scripts(sweep: SweepConfig, sweep_file: Path, members: list[Member]) -> list[Path]:
    """The paths of the scripts: run_all.sh, and slurm/<size>.sbatch for each size."""
    root = Path(sweep.folder)
    (root / "slurm").mkdir(parents=True, exist_ok=True)
    everything = root / "run_all.sh"
    lines = [
        "#!/usr/bin/env bash",
        "# One member after the other; finished ones are skipped, unfinished ones go on.",
    ]
    lines += ["set -u"]
    for member in members:
        done = shlex.join(["python", "tools/sweep.py", "is-finished", str(sweep_file), member.name])
        lines.append(f"{done} --folder {shlex.quote(sweep.folder)} || {shlex.join(launch_command(member))}")
    everything.write_text("\n".join(lines) + "\n", encoding="utf-8")
    written = [everything]
    for size in sweep.sizes:
        own = [member.name for member in members if member.size.name == size.name]
        if own:
            path = root / "slurm" / f"{size.name}.sbatch"
            path.write_text(slurm_array(sweep, sweep_file, size, own), encoding="utf-8")
            written.append(path)
    return written


def slurm_array(sweep: SweepConfig, sweep_file: Path, size: SizeSection, names: list[str]) -> str:
    """An sbatch script whose array tasks are the named members of one size."""
    slurm: SlurmSection = sweep.slurm
    head = {
        "job-name": f"megarl-{size.name}",
        "array": f"0-{len(names) - 1}%{slurm.at_once}",
        "nodes": str(size.nodes),
        "ntasks-per-node": "1",
        "time": slurm.time,
        "output": f"{sweep.folder}/slurm/%x_%a_%j.log",
        "signal": "B:TERM@300",
    }
    if slurm.gpus_per_node:
        head["gpus-per-node"] = str(size.processes)
    head |= {key: value for key, value in (("partition", slurm.partition), ("account", slurm.account)) if value}
    options = [f"#SBATCH --{key}={value}" for key, value in head.items()] + ["#SBATCH --requeue"]
    body = [
        "set -euo pipefail",
        *slurm.setup,
        f"members=({shlex.join(names)})",
        'member="${members[$SLURM_ARRAY_TASK_ID]}"',
        f"folder={shlex.quote(sweep.folder)}",
        f'python tools/sweep.py is-finished {shlex.quote(str(sweep_file))} "$member" --folder "$folder" && exit 0',
        'head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        "# A job that is about to be cut off saves (SIGTERM) and goes on from there when it is queued again.",
        'srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node '
        f'{size.processes} --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" '
        '-m megarl.train "$folder/configs/$member.yaml" &',
        "job=$!",
        """trap 'kill -TERM "$job"; wait "$job" || true; scontrol requeue "$SLURM_JOB_ID"' TERM""",
        'wait "$job"',
    ]
    return "\n".join(["#!/usr/bin/env bash", *options, *body]) + "\n"
