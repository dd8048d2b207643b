"""One JSON request with retries and a deadline."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between attempts, doubling
WORTH_ANOTHER_TRY = (408, 425, 429, 500, 502, 503, 504)

# Reward servers stand inside the cluster, never behind the proxy that downloads may need.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RequestFailed(Exception):
    """No usable answer came: what the last attempt met."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


def post_json(url: str, body: Any, *, deadline: float, retries: int) -> Any:
    """The JSON answer to a POST. Raises RequestFailed after `deadline` seconds or `retries` further attempts.

    Refusals (status 4xx but for 408, 425 and 429) are final; lost connections and server faults are tried again.
    """
    until = time.monotonic() + deadline
    data = json.dumps(body).encode()
    problem = ""
    for attempt in range(retries + 1):
        left = until - time.monotonic()
        if left <= 0:
            break
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with _OPENER.open(request, timeout=left) as response:
                return json.loads(_body(response, until))
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}: {_words(error)}"
            if error.code not in WORTH_ANOTHER_TRY:
                raise RequestFailed(f"{url}: {problem}") from error
        except (ValueError, RecursionError) as error:
            raise RequestFailed(f"{url}: the answer is no JSON: {error}") from error
        except (OSError, http.client.HTTPException) as error:  # a lost connection, an answer cut or garbled
            problem = f"{type(error).__name__}: {error}"
        time.sleep(max(0.0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt, until - time.monotonic())))
    timed_out = time.monotonic() >= until
    how = f"no answer within {deadline:g} s" if timed_out else f"no answer in {retries + 1} attempts"
    raise RequestFailed(f"{url}: {how}; at last {problem or 'silence'}", timed_out=timed_out)


def _body(response: http.client.HTTPResponse, until: float) -> bytes:
    """The whole body. Raises TimeoutError when it still drips in at the time `until`."""
    body = bytearray()
    while piece := response.read1(1 << 20):
        body += piece
        if time.monotonic() >= until:
            raise TimeoutError("the answer did not end in time")
    if response.length:  # what read1 passes over
        raise http.client.IncompleteRead(bytes(body[:100]), response.length)
    return bytes(body)


def _words(error: urllib.error.HTTPError) -> str:
    """What the server said with its refusal, in one line."""
    try:
        return " ".join(error.read(500).decode(errors="replace").split())
    except (OSError, http.client.HTTPException):
        return "without a word"
