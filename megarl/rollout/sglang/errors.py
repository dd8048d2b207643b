"""What goes wrong between the trainer and one rollout server."""

from __future__ import annotations


class ServerError(Exception):
    """One call to one server failed. `status` is that of the HTTP answer, None when none came (refused, reset)."""

    def __init__(self, url: str, call: str, status: int | None, message: str) -> None:
        super().__init__(f"SGLang server {url}: {call}: " + (f"HTTP {status}: " if status else "") + message)
        self.url, self.call, self.status, self.message = url, call, status, message
