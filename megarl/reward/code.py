"""Grading of programs: the program is taken from the response, run on the tests of the ground truth, and counted.

A ground truth is JSON (or, for a test file, its source) in one of the shapes of public data sets:
`{inputs, outputs}` standard input and output, or calls with `fn_name` (Eurus-2-RL-Code, APPS, TACO);
`{test_list, test_setup_code}` assertions (MBPP); `{test, entry_point, prompt}` with `check(candidate)` (HumanEval);
`{test}` or plain source with `test_*` functions that import from `solution` (KodCode).
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megarl.data.outcome import Outcome
from megarl.reward.sandbox import SandboxReport

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON_TAGS = ("python", "python3", "py", "py3")
LONGEST_PROGRAM = 200_000  # characters


class Sandbox(Protocol):
    """Something that runs a job."""

    def run(self, job: dict[str, Any]) -> SandboxReport:
        """The report of the job; never raises for what the program does."""
        ...

    def close(self) -> None:
        """Nothing; frees what it holds."""
        ...


@dataclass(frozen=True)
class CodeRule:
    """How the tests' results become a reward."""

    reward: Literal["all", "fraction"] = "all"


class BadTests(ValueError):
    """The ground truth holds no tests that can be run."""


def grade_code(response: str, ground_truth: str, rule: CodeRule, sandbox: Sandbox) -> Outcome:
    """1.0 when the response's program passes all tests (or the fraction that it passes), else 0.0.

    A ground truth without tests that can be run and a program that the sandbox could not run are failed outcomes.
    """
    try:
        tests = read_tests(ground_truth)
    except BadTests as error:
        return Outcome(0.0, "error", f"the ground truth {error}")
    program = extract_program(response)
    if program is None:
        return Outcome(0.0, "no_answer")
    job = job_of(tests, program) | {"all": rule.reward == "fraction"}
    report = sandbox.run(job)
    if report.timed_out:
        return Outcome(0.0, "wrong", "took too long")  # a program that is too slow is a wrong one
    if report.problem:
        return Outcome(0.0, "crashed", report.problem)
    count = max(count_tests(job), len(report.results))
    passed = sum(ok for ok, _ in report.results)
    complaint = next((detail for ok, detail in report.results if not ok), "")
    if passed == count:
        return Outcome(1.0, "right")
    return Outcome(passed / count if rule.reward == "fraction" else 0.0, "wrong", complaint)


def extract_program(response: str) -> str | None:
    """The last Python block after the thinking part, else the last block that is Python, else bare code; None without.

    A block that never closes counts: generation may have stopped at the length limit right after the code.
    """
    text = response.rpartition("</think>")[2]
    if "<think>" in text:
        text = text.partition("<think>")[0]  # it never stopped thinking
    blocks = [(tag.lower(), source) for tag, source in _FENCE.findall(text)]
    tagged = [source for tag, source in blocks if tag in _PYTHON_TAGS]
    candidates = tagged or [source for tag, source in blocks if tag == "" and _compiles(source)]
    program = candidates[-1] if candidates else text if not blocks and _is_bare_program(text) else None
    return None if program is None or not program.strip() or len(program) > LONGEST_PROGRAM else program


def read_tests(ground_truth: str) -> dict[str, Any]:
    """The tests as one of the shapes above. Raises BadTests that says what is wrong."""
    try:
        tests = json.loads(ground_truth)
    except (ValueError, RecursionError):
        if not _compiles(ground_truth) or not ground_truth.strip():
            raise BadTests("is neither JSON nor Python source of tests") from None
        tests = {"test": ground_truth}
    if isinstance(tests, list):
        tests = {"test_list": tests}
    if not isinstance(tests, dict):
        raise BadTests(f"holds {type(tests).__name__}; allowed: an object or a list of assertions")
    if "inputs" in tests or "outputs" in tests:
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
            raise BadTests("needs lists `inputs` and `outputs` that are not empty")
        if len(inputs) != len(outputs):
            raise BadTests(f"has {len(inputs)} inputs and {len(outputs)} outputs: which belong together is not said")
        if tests.get("fn_name"):
            _arguments(inputs)
    elif "test_list" in tests:
        if not tests["test_list"] or not all(isinstance(test, str) for test in tests["test_list"]):
            raise BadTests("needs a list `test_list` of assertions as text")
        for source in (tests.get("test_setup_code") or "", *tests["test_list"]):
            if not _compiles(source):
                raise BadTests(f"holds a test that is no Python: {source[:80]!r}")
    elif not isinstance(tests.get("test"), str):
        raise BadTests(f"has keys {', '.join(tests)}; needed are inputs and outputs, test_list, or test")
    elif not _compiles(tests["test"]):
        raise BadTests("holds a `test` that is no Python")
    elif not _tests_something(tests["test"], tests.get("entry_point")):
        raise BadTests(
            "holds a `test` that tests nothing: needed are check(candidate) with entry_point, functions test_*, test "
            "classes, or assertions outside functions"
        )
    return tests


def _tests_something(source: str, entry_point: str | None) -> bool:
    """Whether a file of tests has anything that the judge runs; with nothing to run, any program would pass."""
    statements = ast.parse(source).body
    if entry_point and "def check(" in source:
        return True
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test"):
                return True
        elif isinstance(node, ast.ClassDef):
            named = [item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            bases = [ast.unparse(base) for base in node.bases]
            inherits = node.name.startswith("Test") or any(base.endswith("TestCase") for base in bases)
            if inherits and any(name.startswith("test") for name in named):
                return True
        elif not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            for inner in ast.walk(node):
                match inner:
                    case ast.Assert() | ast.Expr(value=ast.Call(func=ast.Name())):
                        return True
    return False


def _arguments(inputs: list[Any]) -> list[list[Any]]:
    """The arguments of each call: a list as it is, text as one JSON value a line. Raises BadTests for other text."""
    arguments = []
    for number, given in enumerate(inputs, start=1):
        if isinstance(given, str):
            try:
                given = [json.loads(line) for line in given.splitlines()]
            except (ValueError, RecursionError) as error:
                raise BadTests(f"has inputs[{number - 1}] that is not JSON, one argument a line: {error}") from None
        arguments.append(given if isinstance(given, list) else [given])
    return arguments


def job_of(tests: dict[str, Any], program: str) -> dict[str, Any]:
    """What the sandbox runs: a dict of plain values."""
    if "inputs" in tests:
        return _input_output_job(tests, program)
    if "test_list" in tests:
        imports = tests.get("test_imports") or []
        setup = "\n".join([*imports, tests.get("test_setup_code") or ""])
        return {"kind": "asserts", "program": program, "setup": setup, "asserts": tests["test_list"]}
    entry = tests.get("entry_point")
    prompt = tests.get("prompt") or ""
    if prompt:
        # What the prompt brings (imports, helpers) comes first; a completion is the rest of its last function.
        completes = entry and not _defines(program, entry)
        program = (prompt + "\n" if completes else _without_entry(prompt, entry)) + program
    return {"kind": "module", "program": program, "source": tests["test"], "entry_point": entry}


def count_tests(job: dict[str, Any]) -> int:
    """Tests of a job as far as that is known before they run."""
    return max(1, len(job.get("inputs") or job.get("asserts") or [None]))


def _input_output_job(tests: dict[str, Any], program: str) -> dict[str, Any]:
    inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if name:
        outputs = [_json_or_text(output) if isinstance(output, str) else output for output in outputs]
        return {"kind": "call", "program": program, "function": name, "inputs": _arguments(inputs), "outputs": outputs}
    texts = {"inputs": [_as_text(item) for item in inputs], "outputs": [_as_text(item) for item in outputs]}
    return {"kind": "stdin", "program": program} | texts


def _as_text(item: Any) -> str:
    return "\n".join(map(str, item)) if isinstance(item, list) else str(item)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_bare_program(text: str) -> bool:
    """Whether text without a fence is Python that does something, or the indented body of a function."""
    if text[:1].isspace() and text.strip():
        return _compiles("def completed():\n" + text)
    if not _compiles(text):
        return False
    doing = (ast.stmt, ast.Call)
    return any(isinstance(node, doing) and not isinstance(node, ast.Expr) for node in ast.walk(ast.parse(text)))


def _compiles(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _defines(program: str, name: str) -> bool:
    return re.search(rf"^(?:(?:async )?def|class) {re.escape(name)}\b", program, re.MULTILINE) is not None


def _without_entry(prompt: str, entry: str | None) -> str:
    """The prompt's source before the function that is to be completed: its imports and helper functions."""
    match = re.search(rf"^def {re.escape(entry)}\b", prompt, re.MULTILINE) if entry else None
    before = prompt[: match.start()] if match else prompt
    return before + "\n" if _compiles(before) else ""
