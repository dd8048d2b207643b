"""Times megarl's head against the unfused pair that other systems use, on the same tensors, in one run.

    python tools/bench_head.py [--tokens T --vocab V --tensor-parallel N] [--json]

Ours: `vocab_parallel_logprob_entropy`. Peer: an entropy function that saves logits and softmax and works in place where
it can, beside Megatron's own vocabulary-parallel cross entropy on a clone of the logits (it overwrites them). Forward
plus backward, gradients of both outputs, which are compared first; fp32 logits, one thread a rank; medians over
interleaved repetitions, each the slowest rank's; peak memory of rank 0 beyond the logits. Without options: a table of
2048 tokens, vocabularies 19,008 and 152,064, 1 and 2 ranks. With `--json` or a size: one case, by default the first.
On GPUs (one a rank) ours is the Triton path, and a third side, ours without Triton, is measured too: `torch_...`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

COLUMNS = {  # of the table: width and number format
    "tokens": (6, "d"),
    "vocab": (7, "d"),
    "tensor_parallel": (15, "d"),
    "ours_ms": (9, ".1f"),
    "peer_ms": (9, ".1f"),
    "time_ratio": (10, ".3f"),
    "ours_mib": (9, ".1f"),
    "peer_mib": (9, ".1f"),
    "memory_ratio": (12, ".4f"),
}
DEADLINE_SECONDS = 1800  # for one case
DEFAULT_CASES = [(2048, vocab, ranks) for vocab in (19_008, 152_064) for ranks in (1, 2)]


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes of new tensors alive at once while `function` runs, by the allocator's own count or events.

    A mode that holds Python references to tensors would not do: autograd adds gradients in place only where nobody else
    holds them.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


class UnfusedEntropy(torch.autograd.Function):
    """Entropy over a vocabulary cut over `group`, keeping logits and softmax for backward.

    As thrifty as this way can be: the products are summed without being held, backward turns the softmax into the
    gradient, and it shifts the saved logits in place and back again.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        top = logits.amax(dim=-1, keepdim=True)
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits - top).exp_()
        total = exponentials.sum(dim=-1, keepdim=True)
        if group is not None:
            dist.all_reduce(total, group=group)
        softmax = exponentials.div_(total)
        mean = torch.linalg.vecdot(softmax, logits)[:, None]
        if group is not None:
            dist.all_reduce(mean, group=group)
        ctx.save_for_backward(logits, softmax, mean)
        return (top + total.log() - mean).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, softmax, mean = ctx.saved_tensors
        logits.sub_(mean)
        softmax.mul_(logits).mul_(-gradient[:, None])
        logits.add_(mean)
        return softmax, None


Head = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def heads(targets: torch.Tensor, group: dist.ProcessGroup | None) -> dict[str, Head]:
    """(logprob [T], entropy [T]) of logits [T, V/TP] as each side computes them."""
    from megarl.policy.head import vocab_parallel_logprob_entropy
    from megarl.policy.mcore import tensor_parallel

    def peer(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        entropy = UnfusedEntropy.apply(source, group)
        # Megatron's cross entropy writes into its input, and the entropy's backward still needs the logits.
        return -tensor_parallel.vocab_parallel_cross_entropy(source.clone(), targets), entropy

    ours: Head = functools.partial(vocab_parallel_logprob_entropy, targets=targets, group=group)
    return {"ours": ours, "peer": peer} | ({"torch": ours} if targets.is_cuda else {})


@contextlib.contextmanager
def path_of(side: str) -> Iterator[None]:
    """Within, the head does without its Triton kernels if `side` is torch."""
    from megarl.policy import head

    chosen = head._kernels
    if side == "torch":
        head._kernels = lambda like: None
    try:
        yield
    finally:
        head._kernels = chosen


def forward_backward(head: Head, source: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(logprob, entropy, gradient of the logits) for a loss that weighs both outputs by `weights` [2, T]."""
    outputs = head(source)
    gradient = torch.autograd.grad(outputs, [source], list(weights))
    return tuple(tensor.detach() for tensor in (*outputs, *gradient))


def check_agreement(sides: dict[str, Head], logits: torch.Tensor, weights: torch.Tensor) -> None:
    """Raises where our outputs or gradients differ from the peer's by more than fp32 rounding."""
    peer = forward_backward(sides["peer"], fresh(logits), weights)
    for side in sides.keys() - {"peer"}:
        with path_of(side):
            ours = forward_backward(sides[side], fresh(logits), weights)
        for one, other in zip(ours, peer, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        del ours, one


def fresh(logits: torch.Tensor) -> torch.Tensor:
    """A copy of the logits that is the result of an operation and wants a gradient, without holding a second buffer."""
    leaf = torch.zeros((), requires_grad=True, device=logits.device)
    return Produced.apply(leaf, logits.clone())


class Produced(torch.autograd.Function):
    """Stands for the output projection: hands on given logits, and takes their gradient without further work."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.new_zeros(()), None


def measure(rank: int, ranks: int, port: int, tokens: int, vocab: int, repeats: int, results: Any) -> None:
    """Puts the medians of one case into `results` (from rank 0)."""
    # The profiler writes to standard output, which belongs to the figures.
    os.dup2(2, 1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["LOCAL_RANK"] = str(rank)
    from megarl.policy.parallel import ParallelConfig, initialize, shutdown

    torch.set_num_threads(1)
    group = initialize(ParallelConfig(tensor=ranks)).tensor_group
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(rank)
    logits = torch.randn(tokens, vocab // ranks, generator=generator, device=device).mul_(3)
    targets = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(99)).to(device)
    weights = torch.rand(2, tokens, generator=torch.Generator().manual_seed(98)).to(device)
    sides = heads(targets, group)
    check_agreement(sides, logits, weights)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, head in sides.items():
            source = fresh(logits)
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            with path_of(name):
                forward_backward(head, source, weights)
            if on_gpu:
                torch.cuda.synchronize()
            elapsed = torch.tensor(time.perf_counter() - began, device=device)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            seconds[name].append(float(elapsed))
            del source
    memory = {}
    for name, head in sides.items():
        source = fresh(logits)
        with path_of(name):
            memory[name] = peak_bytes(functools.partial(forward_backward, head, source, weights))
        del source
    if rank == 0:
        results.put(
            {"seconds": {name: statistics.median(values) for name, values in seconds.items()}, "memory": memory}
        )
    shutdown()


def run_case(tokens: int, vocab: int, ranks: int, repeats: int) -> dict[str, float]:
    """The figures of one case, measured on `ranks` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=measure, args=(rank, ranks, port, tokens, vocab, repeats, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while any(process.exitcode is None for process in processes):
            if any(process.exitcode for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [process.exitcode for process in processes]
        if any(code != 0 for code in codes):
            raise RuntimeError(f"ranks ended with exit codes {codes} (None: still running) within {DEADLINE_SECONDS} s")
    finally:
        for process in processes:
            process.kill()
    found = results.get()
    seconds, memory = found["seconds"], found["memory"]
    mib = 1 << 20
    return {
        "tokens": tokens,
        "vocab": vocab,
        "tensor_parallel": ranks,
        "ours_ms": 1e3 * seconds["ours"],
        "peer_ms": 1e3 * seconds["peer"],
        "time_ratio": seconds["ours"] / seconds["peer"],
        "ours_mib": memory["ours"] / mib,
        "peer_mib": memory["peer"] / mib,
        "memory_ratio": memory["ours"] / memory["peer"],
        "logits_mib": 4 * tokens * vocab / ranks / mib,
    } | ({"torch_ms": 1e3 * seconds["torch"], "torch_mib": memory["torch"] / mib} if "torch" in seconds else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="response tokens (default 2048)")
    parser.add_argument("--vocab", type=int, help="vocabulary size, a multiple of the ranks (default 19008)")
    parser.add_argument("--tensor-parallel", type=int, help="ranks that share the vocabulary (default 1)")
    parser.add_argument("--repeats", type=int, default=7, help="timed repetitions of each side (default 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    for name in ("tokens", "vocab", "tensor_parallel", "repeats"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} = {value} must be at least 1")
    if (options.vocab or 19_008) % (options.tensor_parallel or 1):
        parser.error(f"--vocab must be a multiple of --tensor-parallel = {options.tensor_parallel}")
    one_case = options.tokens or options.vocab or options.tensor_parallel or options.json
    cases = [(options.tokens or 2048, options.vocab or 19_008, options.tensor_parallel or 1)]
    if not options.json:
        print(" ".join(f"{name:>{width}}" for name, (width, _) in COLUMNS.items()))
    for tokens, vocab, ranks in cases if one_case else DEFAULT_CASES:
        result = run_case(tokens, vocab, ranks, options.repeats)
        if options.json:
            print(json.dumps(result))
        else:
            print(" ".join(f"{result[name]:>{width}{form}}" for name, (width, form) in COLUMNS.items()), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
