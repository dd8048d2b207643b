"""Times a whole reinforcement-learning step of the quick start in megarl and in TRL's GRPOTrainer, in one run.

    python tools/bench_step.py [--json]

One step: 512 samples of up to 22 tokens (64 prompts x 8) at temperature 1, graded, then 4 GRPO updates without a KL
term. Both start from the same briefly trained model and use the same prompts, grader, learning rate, fp32 and one
thread a process. megarl runs its own loop with the settings of examples/quickstart/grpo.yaml, on one rank and on two
data-parallel ranks, and keeps its records; TRL runs without logging. Steps alternate between the sides, so that a
change in the machine's load meets all of them; figures are medians. `overhead_share` is the part of a megarl step (one
rank) outside generation, forward, backward and optimizer. `cpu_time_ratio` is
the ratio of processor seconds (one rank), which other work on the machine disturbs less. `*_tokens` are a step's mean
response tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.errors import UserError, exits_cleanly_on_user_error

REPOSITORY = Path(__file__).resolve().parent.parent
QUICKSTART = REPOSITORY / "examples" / "quickstart"
PROMPTS, SAMPLES_PER_PROMPT, RESPONSE_LENGTH, UPDATES = 64, 8, 22, 4
LEARNING_RATE = 1e-5  # small, so that response lengths do not drift during the benchmark
WARM_UP_UPDATES = 300  # supervised updates that make the model
DEADLINE_SECONDS = 300  # for one step, or for a side to start


class Turns:
    """A side's end of the benchmark: takes a turn per line on standard input, reports a step per line on output."""

    def __init__(self) -> None:
        # Whatever a library prints must not mix with the reports.
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = self._cpu_began = 0.0

    def wait(self) -> None:
        """Nothing; returns when the next step may begin. Ends the process when there is none."""
        if not sys.stdin.readline():
            sys.stdout.flush()
            os._exit(0)
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def report(self, **figures: float) -> None:
        """Nothing; hands over the seconds since the turn began, with the step's other figures."""
        figures["seconds"] = time.perf_counter() - self._began
        figures["cpu_seconds"] = time.process_time() - self._cpu_began
        print(json.dumps(figures), file=self._reports, flush=True)


class Stopwatch:
    """Adds up the seconds inside wrapped functions; a wrapped function called by another one counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - began

        return timed


def run_ours(folder: Path, steps: int) -> None:
    """Nothing; megarl's loop, one step a turn."""
    import torch

    from megarl.config import RunConfig, load_config
    from megarl.session import Session
    from megarl.stop import StopRequest
    from megarl.train import train

    torch.set_num_threads(1)
    config = load_config(
        QUICKSTART / "grpo.yaml",
        [
            f"run.folder={folder}/run_{os.environ.get('WORLD_SIZE', '1')}",
            f"model.path={folder}/sft/final_hf",
            f"data.files=[{folder}/data/train.parquet]",
            f"loop={{steps: {steps}, prompts_per_step: {PROMPTS}, updates_per_step: {UPDATES}, filter_groups: false}}",
            "parallel={}",
            f"optimizer={{learning_rate: {LEARNING_RATE}}}",
            f"rollout.samples_per_prompt={SAMPLES_PER_PROMPT}",
            f"rollout.max_response_length={RESPONSE_LENGTH}",
            "evaluation.sets=[]",
        ],
        RunConfig,
    )
    session = Session.start(config)
    counted = time_the_inner_parts(session)
    turns = Turns()
    record, inside_before = session.record, 0.0

    def record_and_report(step: int, metrics: dict[str, float], samples: Any) -> None:
        nonlocal inside_before
        record(step, metrics, samples)
        tokens = sum(sample.response_length for sample in samples)
        turns.report(inside=counted.seconds - inside_before, tokens=tokens)
        turns.wait()
        inside_before = counted.seconds

    session.record = record_and_report  # type: ignore[method-assign]
    turns.wait()
    train(session, StopRequest())


def time_the_inner_parts(session: Any) -> Stopwatch:
    """A stopwatch of generation, forward (model, head, loss), backward and optimizer of this session's step.

    Generation is the engine's: from token ids to samples with their texts. Grading is outside.
    """
    import torch

    from megarl import learn

    watch = Stopwatch()
    engine, policy = session.rollouts.engine, session.policy
    engine._generate_batch = watch.around(engine._generate_batch)
    learn.policy_loss = watch.around(learn.policy_loss)
    for module in policy.modules:
        module.forward = watch.around(module.forward)
    policy._head = watch.around(policy._head)
    torch.autograd.backward = watch.around(torch.autograd.backward)
    policy._step = watch.around(policy._step)
    return watch


def run_peer(folder: Path, steps: int) -> None:
    """Nothing; TRL's GRPOTrainer, one step (a generation and the updates on it) a turn."""
    import datasets
    import pyarrow.parquet as pq
    import torch
    import transformers
    from trl import GRPOTrainer

    from megarl.reward.math import grade

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    rows = pq.read_table(folder / "data" / "train.parquet").to_pylist()
    prompts = datasets.Dataset.from_list(
        [{"prompt": row["prompt"][0]["content"], "answer": row["reward_model"]["ground_truth"]} for row in rows]
    )
    turns = Turns()
    tokens = 0

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal tokens
        tokens = sum(map(len, completion_ids))
        return [grade(text, truth) for text, truth in zip(completions, answer, strict=True)]

    class TakesTurns(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % UPDATES == 0:
                turns.report(tokens=tokens)
                turns.wait()

    model_folder = folder / "sft" / "final_hf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=prompts,
        callbacks=[TakesTurns()],
        args=peer_settings(folder, steps),
    )
    turns.wait()
    trainer.train()


def peer_settings(folder: Path, steps: int) -> Any:
    """TRL's `GRPOConfig` of the same work as ours, without logs, evaluation and checkpoints."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        max_steps=steps * UPDATES,
        per_device_train_batch_size=PROMPTS * SAMPLES_PER_PROMPT // UPDATES,
        gradient_accumulation_steps=1,
        steps_per_generation=UPDATES,
        num_generations=SAMPLES_PER_PROMPT,
        num_iterations=1,
        max_completion_length=RESPONSE_LENGTH,
        temperature=1.0,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class Side:
    """One side of the comparison as its processes (ranks), which take turns with the other sides."""

    def __init__(self, role: str, folder: Path, steps: int, ranks: int = 1) -> None:
        self.steps: list[dict[str, float]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs = [folder / f"{role}_{rank}_of_{ranks}.log" for rank in range(ranks)]
        port = free_port()
        for rank, log in enumerate(self._logs):
            with log.open("wb") as errors:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, "--role", role, "--folder", str(folder), "--steps", str(steps)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=environment(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=rank, MASTER_PORT=port),
                    )
                )

    def step(self) -> None:
        """Nothing; the side has done one more step, whose figures (the slowest rank's) are in `steps`."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        reports = [self._report(process, log) for process, log in zip(self._processes, self._logs, strict=True)]
        self.steps.append(max(reports, key=lambda report: report["seconds"]))

    def median(self, figure: str) -> float:
        """The figure's median over the steps so far."""
        return statistics.median(step[figure] for step in self.steps)

    def close(self) -> None:
        """Nothing; all processes of this side have ended."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _report(self, process: subprocess.Popen[bytes], log: Path) -> dict[str, float]:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_SECONDS)
        line = process.stdout.readline() if ready else b""
        if not line:
            why = "ended early" if ready else f"gave no step within {DEADLINE_SECONDS} s"
            last_words = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{log.stem} {why}; the end of its log:\n{last_words}")
        return json.loads(line)


def environment(**more: object) -> dict[str, str]:
    """This process's environment for a worker with one thread, and `more`."""
    fixed = {
        "OMP_NUM_THREADS": 1,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "127.0.0.1",
        "HF_HUB_OFFLINE": 1,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
    }
    return os.environ | {name: str(value) for name, value in (fixed | more).items()}


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_model_and_data(folder: Path) -> None:
    """Nothing; writes the quick start's data and its model after a short supervised training into the folder."""

    def python(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_PORT=free_port()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"python {' '.join(arguments)} failed:\n{done.stdout[-2000:]}")

    python("-m", "megarl.data.generated", "--out", f"{folder}/data")
    python(str(QUICKSTART / "make_model.py"), "--out", f"{folder}/start")
    python(
        "-m", "megarl.sft", str(QUICKSTART / "sft.yaml"), f"run.folder={folder}/sft", f"model.path={folder}/start",
        f"data.files=[{folder}/data/demonstrations.parquet]", "parallel={}", f"sft.updates={WARM_UP_UPDATES}",
    )  # fmt: skip


def compare(folder: Path, warm_up: int, steps: int) -> dict[str, float]:
    """The benchmark's figures: medians over `steps` steps of each side after `warm_up` ones."""
    make_model_and_data(folder)
    sides: list[Side] = []
    try:
        for role, ranks in (("ours", 1), ("ours", 2), ("peer", 1)):
            sides.append(Side(role, folder, warm_up + steps, ranks))
        for order in range(warm_up + steps):
            for side in sides:
                side.step()
                if order < warm_up:
                    side.steps.clear()
    finally:
        for side in sides:
            side.close()
    ours, ours_dp2, peer = sides
    return {
        "ours_s": ours.median("seconds"),
        "ours_dp2_s": ours_dp2.median("seconds"),
        "peer_s": peer.median("seconds"),
        "time_ratio": ours.median("seconds") / peer.median("seconds"),
        "dp2_time_ratio": ours_dp2.median("seconds") / peer.median("seconds"),
        "overhead_share": statistics.median(1 - step["inside"] / step["seconds"] for step in ours.steps),
        "cpu_time_ratio": ours.median("cpu_seconds") / peer.median("cpu_seconds"),
        "ours_tokens": statistics.fmean(step["tokens"] for step in ours.steps),
        "peer_tokens": statistics.fmean(step["tokens"] for step in peer.steps),
    }


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps of each side (default 3)")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each side (default 9)")
    parser.add_argument("--role", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.role is not None:
        {"ours": run_ours, "peer": run_peer}[options.role](options.folder, options.steps)
        return
    if options.steps < 1 or options.warm_up < 0:
        raise UserError(f"--steps = {options.steps} must be at least 1 and --warm-up = {options.warm_up} at least 0")
    if importlib.util.find_spec("trl") is None:
        raise UserError("TRL is not installed, and this benchmark compares with it: pip install 'megarl[bench]'")
    with tempfile.TemporaryDirectory(prefix="bench_step_") as folder:
        figures = compare(Path(folder), options.warm_up, options.steps)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>14} {value:.4g}")


if __name__ == "__main__":
    main()
