"""The one exception for mistakes that the user can mend, and how an entry point reports it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake in the user's input: one line that says what is wrong, where, and what is allowed."""

    exit_code = 2


class RunStopped(UserError):
    """Something outside the run keeps it from going on: one line that says what, and for how long it was waited for."""

    exit_code = 1


class StopAsked(RunStopped):
    """The run was asked to stop while responses were being generated; they are given up."""


@contextmanager
def writing(what: object) -> Iterator[None]:
    """While inside, an OSError (full disk, no permission) becomes a UserError: `what` cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror or error}") from error


def exits_cleanly_on_user_error(main: Callable[..., None]) -> Callable[..., None]:
    """`main` wrapped so that a `UserError` becomes one line on standard error and exit code 2 (`RunStopped`: 1).

    Under torchrun every rank of a node fails alike; the first one prints, so that the line appears once.
    """

    @functools.wraps(main)
    def wrapper(*args: object, **kwargs: object) -> None:
        try:
            main(*args, **kwargs)
        except UserError as error:
            if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
                print(f"megarl: error: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)

    return wrapper
