"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megarl import stop
from megarl.stop import StopRequest


def wait_for(request: StopRequest) -> str | None:
    deadline = time.monotonic() + 60
    while request.agreed() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return request.agreed()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_a_request_and_no_end(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "SAME_REQUEST_SECONDS", 600.0)  # however slow the machine is
    before = signal.getsignal(number)
    given_up: list[str] = []
    with StopRequest() as request:
        request.give_up = lambda: given_up.append("generation")
        assert request.agreed() is None
        os.kill(os.getpid(), number)
        assert wait_for(request) == number.name
        os.kill(os.getpid(), number)  # the same request, delivered twice
        (reader,) = [thread for thread in threading.enumerate() if thread.name == "signals"]
    reader.join(timeout=60)  # it ends when it has read both
    assert not reader.is_alive()
    assert given_up == ["generation"]
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_a_process_whose_main_thread_is_busy() -> None:
    program = (
        "import ctypes, time\n"
        "from megarl.stop import StopRequest\n"
        "with StopRequest() as request:\n"
        "    request.give_up = lambda: print('asked', flush=True)\n"
        "    print('ready', flush=True)\n"
        "    libc = ctypes.CDLL(None)\n"
        "    end = time.time() + 240\n"
        "    while time.time() < end: libc.sleep(240)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    time.sleep(stop.SAME_REQUEST_SECONDS + 0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    # The main thread is busy for longer than this, and would end with code 0.
    assert process.wait(timeout=120) == 128 + signal.SIGTERM
    process.stdout.close()
