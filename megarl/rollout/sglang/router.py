"""sglang-router in front of the servers: one address for requests. It passes no control calls on."""

from __future__ import annotations

import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.errors import UserError
from megarl.rollout.sglang.launch import choose_port
from megarl.rollout.sglang.process import GuardedProcess

logger = logging.getLogger(__name__)


class Router:
    """A router process over a fixed list of workers."""

    def __init__(
        self,
        python: str,
        workers: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        host: str,
        start_timeout: float,
        request_timeout: float,
    ) -> None:
        """Returns when the router knows all workers. Raises UserError when it does not come to that in time."""
        self.workers = tuple(workers)
        port = choose_port(host, 0)
        self.url = f"http://{host}:{port}"
        command = [python, "-m", "sglang_router.launch_router", "--host", host, "--port", str(port)]
        command += ["--worker-urls", *workers, "--request-timeout-secs", str(round(request_timeout))]
        command += ["--prometheus-port", str(choose_port(host, 0))]
        try:
            self._process = GuardedProcess(command, environment, log)
        except OSError as error:
            raise UserError(f"sglang-router cannot be started: {error}") from error
        self._wait_until_ready(start_timeout)

    def _wait_until_ready(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        # /health says 200 before any worker is registered.
        while not _answers(f"{self.url}/readiness"):
            code = self._process.exit_code()
            if code is not None or time.monotonic() > deadline:
                what = f"ended with exit code {code}" if code is not None else f"was not ready within {seconds:g} s"
                last = self._process.last_words()
                self._process.stop()
                raise UserError(f"sglang-router {what}; the last line of {self._process.log}: {last}")
            time.sleep(0.2)

    def runs(self) -> bool:
        return self._process.exit_code() is None

    def close(self) -> None:
        """Nothing; the router is gone."""
        self._process.stop()


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
