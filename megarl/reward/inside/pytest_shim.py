"""The part of pytest that the test files of data sets use: raises, approx, mark.parametrize."""

import math
import unittest
from unittest import TestCase


class raises:
    """A context in which one of the given exceptions must be raised; a program's own class is matched by its name."""

    def __init__(self, expected, match=None):
        self._expected, self._match = expected if isinstance(expected, tuple) else (expected,), match
        self.value = None

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            raise AssertionError("did not raise")
        self.value = value
        for expected in self._expected:
            if isinstance(expected, type):
                matches = issubclass(kind, expected)
            else:
                matches = expected.__name__ in getattr(value, "names", ())
            if matches:
                if self._match is not None:
                    import re

                    assert re.search(self._match, str(value)), f"{value} does not match {self._match}"
                return True
        return False


class approx:
    """A number, or a list or dict of numbers, that is equal within a tolerance."""

    def __init__(self, expected, rel=None, abs=None):
        self._expected = expected
        self._relative, self._absolute = 1e-6 if rel is None else rel, 1e-12 if abs is None else abs

    def __eq__(self, other):
        return self._close(self._expected, other)

    def __repr__(self):
        return f"approx({self._expected!r})"

    def _close(self, expected, other):
        if isinstance(expected, dict):
            return expected.keys() == other.keys() and all(self._close(expected[key], other[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            return len(expected) == len(other) and all(map(self._close, expected, other))
        return math.isclose(expected, other, rel_tol=self._relative, abs_tol=self._absolute)


class _Mark:
    def parametrize(self, names, rows, ids=None):
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def mark(function):
            cases = [dict(zip(names, row if len(names) > 1 else (row,))) for row in rows]
            function.parameters = [
                {**case, **outer} for case in cases for outer in getattr(function, "parameters", [{}])
            ]
            return function

        return mark

    def __getattr__(self, name):
        def other_mark(*arguments, **named):
            return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else lambda function: function

        return other_mark


mark = _Mark()


def fail(reason=""):
    """Never returns; the test has failed."""
    raise AssertionError(reason)


def fixture(function=None, **settings):
    """The function, marked as what makes a test's argument of its name."""
    if function is None:
        return lambda marked: fixture(marked, **settings)
    function.is_fixture = True
    return function


def cases(function, namespace):
    """The calls that a test function stands for."""
    return [lambda values=values: _run(function, values, namespace) for values in getattr(function, "parameters", [{}])]


def _run(function, given, namespace):
    """What the call gives, arguments that are not given made by the fixtures of their names."""
    import inspect

    arguments = dict(given)
    for name in inspect.signature(function).parameters:
        if name not in arguments and getattr(namespace.get(name), "is_fixture", False):
            made = _run(namespace[name], {}, namespace)
            arguments[name] = next(made) if inspect.isgenerator(made) else made
    result = function(**arguments)
    if inspect.iscoroutine(result):
        import asyncio

        return asyncio.run(result)
    return result


def class_cases(kind, namespace):
    """The calls that a test class stands for."""
    if issubclass(kind, TestCase):
        names = unittest.TestLoader().getTestCaseNames(kind)
        return [lambda name=name: _run_case(kind, name) for name in names]

    def one(name, values):
        instance = kind()
        if hasattr(instance, "setup_method"):
            instance.setup_method()
        _run(getattr(instance, name), values, namespace)

    return [
        lambda name=name, values=values: one(name, values)
        for name in dir(kind)
        if name.startswith("test")
        for values in getattr(getattr(kind, name), "parameters", [{}])
    ]


def _run_case(kind, name):
    """Nothing; runs one method of a TestCase with its class's preparation; raises what fails, an async one's, too."""
    if kind.setUpClass.__func__ is not TestCase.setUpClass.__func__:
        kind.setUpClass()
    result = unittest.TestResult()
    kind(name).run(result)
    for _, text in result.failures + result.errors:
        raise AssertionError(text.strip().splitlines()[-1])
    if result.unexpectedSuccesses:
        raise AssertionError("passed where a failure is expected")
