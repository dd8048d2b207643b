"""Settings of all tests."""

import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Nothing; Megatron imports triton too, and the interpreter needs it to be imported its way, before the tests are.

    A process that only hands tests to others needs neither.
    """
    if not config.getoption("numprocesses", None):
        from tests.triton_interpreter import import_triton

        import_triton()
