"""The tests' side: runs a data set's tests against a program that lives in another process.

What the program defines is seen through proxies; what it returns arrives as plain data. So tests compare real values,
and a program can neither reach into them nor answer with objects that call themselves equal to everything.
"""

import builtins
import sys

import compare
import values


class ProgramEnded(Exception):
    """The program's process is gone."""


class ProgramError(Exception):
    """The program raised an exception of its own making."""

    def __init__(self, names, text):
        super().__init__(text)
        self.names = names


class Program:
    """The connection to the program's process."""

    def __init__(self, requests, answers):
        self._requests, self._answers = requests, answers
        self._callbacks = []

    def loaded(self):
        """Nothing; raises what loading the program raised."""
        self._result()

    def ask(self, action, target=None, arguments=(), named=None, **more):
        """The value of one request. Raises the program's exception."""
        forms = [values.encode(argument, self._own) for argument in arguments]
        named_forms = {name: values.encode(value, self._own) for name, value in (named or {}).items()}
        request = {"action": action, "target": target, "arguments": forms, "named": named_forms, **more}
        try:
            values.send(self._requests, request)
        except (BrokenPipeError, OSError) as error:
            raise ProgramEnded from error
        return self._result()

    def call(self, target, arguments, named):
        """The result of a call; lists, dicts and sets that the program changed are changed here, too."""
        result, changed = self.ask("call", target, arguments, named)
        for place, content in changed.items():
            argument = arguments[int(place)]
            argument.clear()
            (argument.extend if isinstance(argument, list) else argument.update)(content)
        return result

    def _result(self):
        while True:
            try:
                message = values.receive(self._answers)
            except (EOFError, ValueError, values.TooLarge) as error:
                raise ProgramEnded from error
            if "callback" not in message:
                break
            function = self._callbacks[message["callback"]]
            result = function(*[self._decode(form) for form in message["arguments"]])
            values.send(self._requests, {"value": values.encode(result, self._own)})
        if "raised" in message:
            raise _exception(message["raised"], message["text"])
        return self._decode(message["value"])

    def _decode(self, form):
        return values.decode(form, self._proxy)

    def _proxy(self, form):
        number, kind, _ = form["h"]
        return Proxy(self, int(number), str(kind))

    def _own(self, value):
        if isinstance(value, Proxy):
            return {"h": [value._number, value._kind, True]}
        if callable(value):
            self._callbacks.append(value)
            return {"judge": len(self._callbacks) - 1}
        if hasattr(value, "__iter__"):
            return values.encode(list(value), self._own)
        raise TypeError(f"a test hands over a {type(value).__name__}, which cannot cross to the program")


def _exception(names, text):
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            if name == names[0] and issubclass(kind, Exception):
                try:
                    return kind(text)
                except TypeError:
                    break
            if issubclass(kind, Exception):
                # An exception class of the program's own, catchable by its built-in ancestor.
                return type(str(names[0]), (ProgramError, kind), {"__init__": ProgramError.__init__})(names, text)
            return ProgramError(names, text)
    return ProgramError(names, text)


class Proxy:
    """An object of the program's process. Compared with plain data it is different from everything."""

    def __init__(self, program, number, kind):
        self.__dict__.update(_program=program, _number=number, _kind=kind)

    def __call__(self, *arguments, **named):
        return self._program.call(self._number, list(arguments), named)

    def __getattr__(self, name):
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._program.ask("get", self._number, name=name)

    def __setattr__(self, name, value):
        self._program.ask("set", self._number, name=name, value=values.encode(value, self._program._own))

    def __iter__(self):
        return iter(self._program.ask("list", self._number))

    def __eq__(self, other):
        return isinstance(other, Proxy) and self._program.ask("eq", self._number, [other]) is True

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(self._number)

    def __instancecheck__(self, value):
        return isinstance(value, Proxy) and self._program.ask("isinstance", value._number, [self]) is True


def _operator(name, kind=None):
    def ask(self, *arguments):
        result = self._program.ask(name, self._number, arguments)
        return result if kind is None else kind(result)

    return ask


for _name, _kind in (("len", int), ("str", str), ("repr", str), ("bool", bool), ("next", None), ("contains", bool)):
    setattr(Proxy, f"__{_name}__", _operator(_name, _kind))
for _name in ("getitem", "setitem", "neg"):
    setattr(Proxy, f"__{_name}__", _operator(_name))


def _order(name):
    def ask(self, other):
        # With a number, the program's object would say what the test wants to hear.
        return self._program.ask(name, self._number, [other]) if isinstance(other, Proxy) else NotImplemented

    return ask


def _arithmetic(name):
    def ask(self, other):
        result = self._program.ask(name, self._number, [other])
        if not isinstance(other, Proxy) and not isinstance(result, Proxy):
            raise TypeError(f"{name} of the program's {self._kind} and plain data gives plain data")
        return result

    return ask


for _name in ("lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_name}__", _order(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(Proxy, f"__{_name}__", _arithmetic(_name))


class Namespace(dict):
    """A test module's globals: names that it does not define come from the program."""

    def __init__(self, program):
        super().__init__(__builtins__=builtins, __name__="tests")
        self._program = program

    def __missing__(self, name):
        if hasattr(builtins, name):
            return getattr(builtins, name)
        try:
            return self._program.ask("get", None, name=name)
        except AttributeError:
            raise NameError(f"name {name!r} is not defined") from None


def _program_module(program):
    module = type(sys)("solution")

    def get(name):
        if name == "__all__":
            return program.ask("names")
        return program.ask("get", None, name=name)

    module.__getattr__ = get
    return module


def run_tests(program, job):
    """[[passed, detail], ...] of the job's tests, one entry a test; stops at a failure unless all are wanted."""
    program.loaded()
    sys.modules["solution"] = _program_module(program)
    results = []
    for test in _tests(program, job):
        try:
            test()
            results.append([True, ""])
        except ProgramEnded:
            results.append([False, "the program ended in the middle of a test"])
            break
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            results.append([False, f"{type(error).__name__}: {error}"[:300]])
            if not job["all"]:
                break
    return results


def _tests(program, job):
    if job["kind"] == "call":
        function = _function(program, job["function"])
        wrapped = compare.are_wrapped(job["outputs"])
        for arguments, expected in zip(job["inputs"], job["outputs"]):
            yield lambda arguments=arguments, expected=expected: _check_call(function, arguments, expected, wrapped)
    elif job["kind"] == "asserts":
        namespace = Namespace(program)
        exec(compile(job["setup"], "setup", "exec"), namespace)
        for source in job["asserts"]:
            yield lambda source=source: exec(compile(source, "test", "exec"), namespace)
    else:
        yield from _module_tests(program, job)


def _module_tests(program, job):
    """Tests of a whole file: `check(candidate)` as in HumanEval, else its `test_*` functions and TestCase classes."""
    namespace = Namespace(program)
    if job.get("entry_point") and "def check(" in job["source"]:
        exec(compile(job["source"], "tests", "exec"), namespace)
        candidate = program.ask("get", None, name=job["entry_point"])
        yield lambda: namespace["check"](candidate)
        return
    import pytest_shim

    sys.modules["pytest"] = pytest_shim
    exec(compile(job["source"], "tests", "exec"), namespace)
    found = False
    for name, value in list(namespace.items()):
        if name.startswith("test") and isinstance(value, type(run_tests)):
            for test in pytest_shim.cases(value, namespace):
                found = True
                yield test
        elif isinstance(value, type) and (name.startswith("Test") or issubclass(value, pytest_shim.TestCase)):
            for test in pytest_shim.class_cases(value, namespace):
                found = True
                yield test
    if not found:
        yield lambda: None  # asserts at the file's top level: they have passed


def _function(program, name):
    solution = None
    try:
        solution = program.ask("get", None, name="Solution")
    except AttributeError:
        return program.ask("get", None, name=name)
    try:
        return program.ask("get", None, name=name)
    except AttributeError:
        return getattr(solution(), name)


def _check_call(function, arguments, expected, wrapped):
    result = function(*arguments)
    if not isinstance(result, Proxy) and compare.same_value(expected, result, wrapped=wrapped):
        return
    raise AssertionError(f"got {result!r:.100}, wanted {expected!r:.100}")
