"""Programs judged by a remote sandbox with SandboxFusion's HTTP interface (`POST /run_code`).

Its answers are trusted. Each input/output test is one run there and compared here. Tests that call the program are run
in one script together with it, and count when the script prints the job's nonce at its end: unlike under bubblewrap,
such tests and the program share a process.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from megarl.reward.http import RequestFailed, post_json
from megarl.reward.inside.compare import are_wrapped, same_output, same_value
from megarl.reward.sandbox import SandboxConfig, SandboxReport

RETRIES = 3

_CALLS = """
import json as _json
def _find(name):
    if name in globals():
        return globals()[name]
    return getattr(Solution(), name)
_results = [_find({name!r})(*_arguments) for _arguments in _json.loads({arguments!r})]
print({nonce!r} + _json.dumps(_results))
"""
_FILE = """
import sys as _sys, types as _types
_module = _types.ModuleType("solution")
_module.__dict__.update(globals())
_sys.modules["solution"] = _module
{tests}
{calls}
print({nonce!r})
"""
_EACH_TEST = """
for _name, _test in list(globals().items()):
    if _name.startswith("test") and callable(_test):
        _test()
"""


@dataclass
class RemoteSandbox:
    """A `Sandbox` over HTTP."""

    config: SandboxConfig

    def run(self, job: dict[str, Any]) -> SandboxReport:
        """The report of one job."""
        try:
            if job["kind"] == "stdin":
                return self._input_output(job)
            return self._script(job)
        except RequestFailed as error:
            return SandboxReport([], str(error))

    def close(self) -> None:
        """Nothing; there is nothing to free."""

    def _input_output(self, job: dict[str, Any]) -> SandboxReport:
        results: list[tuple[bool, str]] = []
        for given, expected in zip(job["inputs"], job["outputs"], strict=True):
            output, problem = self._run_code(job["program"], given, self.config.test_seconds)
            if not problem and not same_output(expected, output):
                problem = "wrong output"
            results.append((not problem, problem))
            if problem and not job.get("all"):
                break
        return SandboxReport(results)

    def _script(self, job: dict[str, Any]) -> SandboxReport:
        nonce = secrets.token_hex(16)
        if job["kind"] == "call":
            calls = _CALLS.format(name=job["function"], arguments=json.dumps(job["inputs"]), nonce=nonce)
            output, problem = self._run_code(job["program"] + "\n" + calls, "", self.config.total_seconds)
            return self._compared(job, output, nonce, problem)
        if job["kind"] == "asserts":
            script = "\n".join([job["setup"], job["program"], *job["asserts"], f"print({nonce!r})"])
        else:
            entry = job.get("entry_point")
            calls = f"check({entry})" if entry else _EACH_TEST
            script = job["program"] + "\n" + _FILE.format(tests=job["source"], calls=calls, nonce=nonce)
        output, problem = self._run_code(script, "", self.config.total_seconds)
        passed = not problem and output.rstrip().endswith(nonce)
        count = len(job["asserts"]) if job["kind"] == "asserts" and passed else 1
        return SandboxReport([(passed, problem or ("" if passed else "the tests did not come to their end"))] * count)

    def _compared(self, job: dict[str, Any], output: str, nonce: str, problem: str) -> SandboxReport:
        line = output.rstrip().rpartition("\n")[2]
        if problem or not line.startswith(nonce):
            return SandboxReport([(False, problem or "the calls did not come to their end")])
        wrapped = are_wrapped(job["outputs"])
        results = json.loads(line[len(nonce) :])
        return SandboxReport(
            [
                (same_value(expected, result, wrapped=wrapped), "wrong result")
                for expected, result in zip(job["outputs"], results, strict=True)
            ]
        )

    def _run_code(self, code: str, stdin: str, seconds: float) -> tuple[str, str]:
        """(standard output, problem) of one run. Raises RequestFailed when the sandbox itself fails."""
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": seconds,
            "compile_timeout": seconds,
            "memory_limit_MB": self.config.memory_mib,
        }
        url = f"{str(self.config.url).rstrip('/')}/run_code"
        answer = post_json(url, body, deadline=2 * seconds + 30, retries=RETRIES)
        result = answer.get("run_result") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or answer.get("status") == "SandboxError" or not isinstance(result, dict):
            message = answer.get("message", "") if isinstance(answer, dict) else answer
            raise RequestFailed(f"{url}: {str(message)[:200] or 'no run_result'}")
        if result.get("status") == "TimeLimitExceeded":
            return "", f"took more than {seconds:g} s"
        if result.get("return_code") != 0:
            last = str(result.get("stderr") or "").strip().splitlines()[-1:]
            return "", f"exit status {result.get('return_code')}" + (f": {last[0][:200]}" if last else "")
        return str(result.get("stdout") or ""), ""
