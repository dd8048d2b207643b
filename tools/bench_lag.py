"""Times training steps with and without rollout.lag against the longer of generation and update, in one run.

    python tools/bench_lag.py --server-python PYTHON [--steps N] [--response-length N] [--json]

One training rank and one SGLang server, each on a core of its own; the same run once with rollout.lag = 0, once with
rollout.lag = 1. generation_s and update_s are what the two take in turn (lag = 0): from the first request of a batch to
its last grade, and scores, updates and hand-over of weights. `lag_ratio` is the median step of the lag = 1 run over the
longer of the two (1 is full overlap), `turn_ratio` the same of the lag = 0 run. Choose --response-length so that both
take about as long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sglang_bench import on_core, running_server, write_model

from megarl.data.generated import write_arithmetic
from megarl.errors import UserError, exits_cleanly_on_user_error

DEADLINE_SECONDS = 1200  # for one run
TRAINER_CORE, SERVER_CORE = 0, 1


def config_tree(folder: Path, model: Path, url: str, lag: int, options: argparse.Namespace) -> dict[str, Any]:
    """A run of GRPO on generated sums. An untrained model earns nothing: a trace of entropy bonus trains it."""
    return {
        "run": {"folder": str(folder / f"lag_{lag}")},
        "loop": {
            "steps": options.steps,
            "prompts_per_step": options.prompts,
            "updates_per_step": 2,
            "filter_groups": False,
            "save_hf": False,
        },
        "model": {"path": str(model)},
        "data": {"files": [str(folder / "data" / "train.parquet")], "chat_template": False, "max_prompt_length": 32},
        # Small, so that response lengths do not drift.
        "optimizer": {"learning_rate": 1e-6},
        "objective": {"entropy_coefficient": 1e-6},
        "policy": {"micro_batch_tokens": 4096},
        "rollout": {
            "engine": "sglang",
            "urls": [url],
            "samples_per_prompt": 8,
            "max_response_length": options.response_length,
            "lag": lag,
        },
        "evaluation": {"every": 1000, "sets": []},
    }


def run(folder: Path, model: Path, url: str, lag: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of the run's steps but the first two, which warm up, and the last, which trains nothing."""
    path = folder / f"lag_{lag}.yaml"
    tree = config_tree(folder, model, url, lag, options)
    path.write_text(yaml.safe_dump(tree))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with on_core(TRAINER_CORE):
        done = subprocess.run(
            [sys.executable, "-m", "megarl.train", str(path)],
            env=environment,
            stdout=sys.stderr,
            timeout=DEADLINE_SECONDS,
        )
    if done.returncode:
        raise UserError(f"the run with rollout.lag = {lag} ended with exit code {done.returncode}")
    lines = (Path(tree["run"]["folder"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][2:-1]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The medians, by the names of the printed object."""
    model = write_model(folder / "model", hidden=options.hidden, layers=options.layers, vocabulary=512)
    write_arithmetic(folder / "data", train=4 * options.prompts, evaluation=1, demonstrations=1, seed=0)
    with running_server(options.server_python, model, folder / "server.log", core=SERVER_CORE) as url:
        turns = run(folder, model, url, 0, options)
        ahead = run(folder, model, url, 1, options)

    def median(steps: list[dict[str, float]], *names: str) -> float:
        return statistics.median(sum(step[name] for name in names) for step in steps)

    trainer = ("time/score", "time/update", "time/weights")
    result = {
        "generation_s": median(turns, "time/rollout"),
        "update_s": median(turns, *trainer),
        "turn_step_s": median(turns, "time/step"),
        "lag_step_s": median(ahead, "time/step"),
        "lag_generation_s": median(ahead, "time/rollout"),
        "lag_update_s": median(ahead, *trainer),
        "lag_staleness_max": max(step["rollout/staleness_max"] for step in ahead),
    }
    longer = max(result["generation_s"], result["update_s"])
    return result | {"lag_ratio": result["lag_step_s"] / longer, "turn_ratio": result["turn_step_s"] / longer}


@exits_cleanly_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-python", required=True, help="interpreter with sglang (tools/install_sglang_cpu.sh)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (default 12)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step, 8 samples each (default 16)")
    parser.add_argument("--response-length", type=int, default=128, help="tokens a response (default 128)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="layers (default 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.steps < 5:
        parser.error(f"--steps = {options.steps} must be at least 5")
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("the benchmark needs two cores")
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        result = measure(options, Path(folder))
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:>18} {value:8.3f}")


if __name__ == "__main__":
    main()
