"""When a program's output or result counts as the expected one."""

RELATIVE, ABSOLUTE = 1e-6, 1e-9  # how far floating-point results may be off
INFINITY = float("inf")


def same_output(expected, output):
    """Whether two outputs are the same, line for line, blanks at line ends and empty lines at the end aside.

    Numbers with a decimal point may be off by 1e-6, relatively or absolutely.
    """
    wanted, given = (text.rstrip().splitlines() or [""] for text in (expected, output))
    return len(wanted) == len(given) and all(map(_same_line, wanted, given))


def _same_line(wanted, given):
    if wanted.rstrip() == given.rstrip():
        return True
    tokens = wanted.split(), given.split()
    return len(tokens[0]) == len(tokens[1]) and all(map(_same_token, *tokens))


def _same_token(wanted, given):
    if wanted == given:
        return True
    if not any(mark in wanted.lower() for mark in ".e") or not any(symbol.isdigit() for symbol in wanted):
        return False
    try:
        first, second = float(wanted), float(given)
    except ValueError:
        return False
    return abs(first) != INFINITY and abs(first - second) <= 1e-6 * max(1.0, abs(first))


def are_wrapped(outputs):
    """Whether every expected result is a list of one: some data sets wrap results so, without saying it."""
    return all(isinstance(output, list) and len(output) == 1 for output in outputs)


def same_value(expected, result, *, wrapped=False):
    """Whether a result is the expected JSON value: lists and tuples alike, floats within RELATIVE, text only as text.

    What is compared must be plain data. `wrapped`: the result may also be what the expected list of one holds.
    """
    if wrapped and same_value(expected[0], result):
        return True
    if isinstance(expected, (list, tuple)) and isinstance(result, (list, tuple)):
        return len(expected) == len(result) and all(same_value(a, b) for a, b in zip(expected, result))
    if isinstance(expected, dict) and isinstance(result, dict):
        texts = {str(key): value for key, value in result.items()}
        return len(texts) == len(expected) and all(
            str(key) in texts and same_value(value, texts[str(key)]) for key, value in expected.items()
        )
    if isinstance(expected, list) and isinstance(result, set):
        return len(expected) == len(result) and all(any(same_value(a, b) for b in result) for a in expected)
    numbers = (int, float)
    if isinstance(expected, numbers) and isinstance(result, numbers):
        if isinstance(expected, float) or isinstance(result, float):
            near = abs(expected) != INFINITY and abs(expected - result) <= max(ABSOLUTE, RELATIVE * abs(expected))
            return expected == result or near
        return expected == result
    return type(expected) is type(result) and expected == result
