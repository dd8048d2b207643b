"""Times generation through megarl's client against a bare asynchronous loop with the same requests.

    python tools/bench_rollout.py --server-python PYTHON [--requests N --tokens N --concurrency N --repeats N] [--json]

One real SGLang server of a generated model on this machine's CPU. The bare loop posts the same JSON bodies with the
same number of open requests and keeps the parsed answers: no checks, no retries, no samples. Both sides take turns in
one run; figures are medians. A few responses end before `--tokens` tokens, by chance: both sides count what they got.

JSON: ours_tokens_per_s, bare_tokens_per_s, throughput_ratio (aim: at least 0.95).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sglang_bench import running_server, write_model

from megarl.data.samples import Prompt
from megarl.data.weights import NamedTensors
from megarl.errors import exits_cleanly_on_user_error
from megarl.policy.hf_weights import SafetensorsFolder, expected_tensors
from megarl.policy.model import read_model_shape
from megarl.rollout.config import RolloutConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.sglang.engine import SglangEngine
from megarl.rollout.sglang.wire import generate_body
from megarl.session import load_tokenizer


def build_engine(url: str, model: Path, folder: Path, concurrency: int) -> SglangEngine:
    """An engine over the server, which holds the model's own weights as a version of the engine's."""
    shape = read_model_shape(model)
    expected = expected_tensors(shape)
    engine = SglangEngine(
        RolloutConfig(engine="sglang", urls=[url], concurrency=concurrency, sync="http", verify_sync="off"),
        str(model),
        load_tokenizer(str(model)),
        expected=expected,
        max_positions=shape.max_positions,
        folder=folder,
        seed=1,
    )
    source = SafetensorsFolder(model)
    weights = NamedTensors(expected, lambda: ((name, source.slice(name)[:]) for name in expected))
    engine.update_weights(weights, version=0)
    return engine


def requests_of(count: int, tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(Prompt(index, "bench", [3 + index % 9, 4, 5], "1"), index, index, 1.0, tokens, (1, 2))
        for index in range(count)
    ]


async def bare_loop(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Any]:
    """The parsed answers."""
    free = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def ask(body: dict[str, Any]) -> Any:
            async with free, session.post(f"{url}/generate", json=body) as response:
                return await response.json()

        return await asyncio.gather(*(ask(body) for body in bodies))


def measure(options: argparse.Namespace, url: str, model: Path, folder: Path) -> dict[str, float]:
    """The medians of both sides."""
    engine = build_engine(url, model, folder, options.concurrency)
    requests = requests_of(options.requests, options.tokens)
    bodies = [generate_body(request, engine._model, "") for request in requests]
    for body in bodies:
        del body["rid"]
    speeds: dict[str, list[float]] = {"ours": [], "bare": []}  # tokens/s
    for repeat in range(-1, options.repeats):  # the first one warms up
        for side in ("ours", "bare") if repeat % 2 else ("bare", "ours"):
            began = time.perf_counter()
            if side == "ours":
                samples = engine.generate(requests)
                produced = sum(sample.response_length for sample in samples if sample is not None)
            else:
                answers = asyncio.run(bare_loop(url, bodies, options.concurrency))
                produced = sum(len(answer["output_ids"]) for answer in answers)
            if repeat >= 0:
                speeds[side].append(produced / (time.perf_counter() - began))
    engine.close()
    # Neighbouring turns meet the same machine: the median of their ratios is steadier than the ratio of medians.
    ratio = statistics.median(ours / bare for ours, bare in zip(speeds["ours"], speeds["bare"], strict=True))
    return {
        "ours_tokens_per_s": statistics.median(speeds["ours"]),
        "bare_tokens_per_s": statistics.median(speeds["bare"]),
        "throughput_ratio": ratio,
    }


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; prints the figures."""
    parser = argparse.ArgumentParser(description="Generation through megarl's client against a bare loop.")
    parser.add_argument("--server-python", required=True, help="Python of an environment that has sglang")
    parser.add_argument("--requests", type=int, default=256, help="requests of one turn (default 256)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response at most (default 64)")
    parser.add_argument("--concurrency", type=int, default=64, help="open requests at a time (default 64)")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        folder = Path(name)
        model = write_model(folder / "model", hidden=64, layers=2, vocabulary=512)
        with running_server(options.server_python, model, folder / "server.log") as url:
            figures = measure(options, url, model, folder)
    if options.json:
        print(json.dumps(figures))
        return
    print(
        f"megarl {figures['ours_tokens_per_s']:,.0f} tokens/s, bare loop {figures['bare_tokens_per_s']:,.0f} tokens/s"
    )
    print(f"throughput ratio {figures['throughput_ratio']:.3f} (aim: at least 0.95)")


if __name__ == "__main__":
    main(sys.argv[1:])
