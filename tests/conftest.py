"""Settings of all tests."""

from hypothesis import settings

from tests.triton_interpreter import import_triton

# How long an example takes depends on what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Megatron imports triton too, and the interpreter needs it to be imported its way.
import_triton()
