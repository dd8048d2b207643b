"""Equality of two expressions by the mathematics library: math-verify's parser, values at points, its verdict last.

Nothing here is bounded in time or memory but for cheap guards: it belongs into a killable worker process.
"""

from __future__ import annotations

import hashlib
import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megarl.errors import UserError
from megarl.reward.exact_numbers import parse_number
from megarl.reward.notation import split_top_level
from megarl.reward.structure import DOUBLE_DIGITS
from megarl.reward.units import TRIGONOMETRIC

PRECISION = 40  # decimal digits of a value
SAME = 1e-25  # relative difference below which two values are the same
SAME_DOUBLE = 2e-15  # the same where one side is written as a double
POINTS = 3  # positive places at which expressions with variables are compared, and as many negative ones
LONGEST_EXPRESSION = 1000  # characters

_DECIMAL = re.compile(r"(?<![\w.])\d*\.\d+(?![\d.]*[eE][-+]?\d)|(?<![\w.])\d+\.(?!\d)")
_E_NOTATION = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,4})(?![\w.])")
_LONG_DECIMAL = re.compile(rf"\d*\.\d{{{DOUBLE_DIGITS - 1},}}")
_PLAIN_POWER = re.compile(r"\^ ?\(([^()]*)\)")
_LONG_POWER = re.compile(r"\^ ?(-?\d{2,})")
_TOWER = re.compile(r"(\d+) ?\^ ?\{? ?\(?(\d+) ?\^ ?\{? ?\(?(\d+)")
_HUGE_POWER = re.compile(r"\^ ?\{? ?-?(\d{6,})")
_HUGE_FACTORIAL = re.compile(r"(\d{5,}) ?!|[})] ?!\s*!|! ?!|\^ ?\{?[^{}]*\}? ?\)? ?!")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?) ?\^ ?\\circ")
_ODD_ROOT = re.compile(r"\\sqrt ?\[ ?(\d*[13579]) ?\] ?\{ ?- ?(\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}) ?\}")
_NUMBER = r"(?<![\w.^_}\\])\d+(?:\.\d+)?"
_MIXED = re.compile(r"(?<![\w.^_}\\])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}")
_BEFORE_BRACKET = re.compile(rf"({_NUMBER}) ?(?=[(\[{{])")
_BETWEEN_BRACKETS = re.compile(r"\) ?(?=[(\d])")
_NUMBERS_APART = re.compile(rf"{_NUMBER} +\d")
LARGEST_TOWER_BITS = 10**6


class NotAnExpression(Exception):
    """The text is nothing that the library understands."""


class TooCostly(Exception):
    """Working the expression out would take too long or too much memory."""


def same_expression(truth: str, answer: str) -> bool:
    """Whether two normalised expressions have the same value for all (positive) values of their variables.

    An equation `left = right` is compared as the set of its solutions: the same up to a constant factor. Raises
    NotAnExpression for what cannot be read, TooCostly for what an estimate says is not worth working out.
    """
    ours, theirs = _split_equation(truth), _split_equation(answer)
    if (ours is None) != (theirs is None):
        return False
    double = bool(_LONG_DECIMAL.search(truth)) != bool(_LONG_DECIMAL.search(answer))
    tolerance = SAME_DOUBLE if double else SAME
    if ours is not None and theirs is not None:
        return _proportional(_difference(ours), _difference(theirs), tolerance)
    return _equal(parse(truth), parse(answer), tolerance)


@lru_cache(maxsize=4096)
def parse(text: str) -> Any:
    """The sympy expression of a normalised text. Raises NotAnExpression or TooCostly."""
    latex2sympy, config = _parser()
    refuse_costly(text)
    try:
        parsed = latex2sympy(_for_the_parser(text), normalization_config=None, conversion_config=config)
    except Exception as error:  # the parser raises bare Exception, and sympy whatever it meets
        raise NotAnExpression(f"{text[:80]!r}: {' '.join(str(error).split())[:120]}") from error
    return _complex_unit(parsed)


def refuse_costly(text: str) -> None:
    """Nothing, or TooCostly for towers of powers and factorials of a size that no answer needs."""
    if len(text) > LONGEST_EXPRESSION:
        raise TooCostly(f"{len(text)} characters")
    for base, middle, top in _TOWER.findall(text):
        if len(top) > 4 or len(middle) > 6 or len(base) * 4 * int(middle) ** min(int(top), 64) > LARGEST_TOWER_BITS:
            raise TooCostly(f"a tower of powers {base}^{middle}^{top}")
    if _HUGE_POWER.search(text):
        raise TooCostly("a power with a huge exponent")
    if _HUGE_FACTORIAL.search(text):
        raise TooCostly("a huge factorial")


@lru_cache(maxsize=1)
def _parser() -> tuple[Any, Any]:
    try:
        from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    except ModuleNotFoundError as error:
        raise UserError("reward.function = math needs the package math-verify, which is not installed") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return latex2sympy, ConversionConfig(lowercase_symbols=False)


def _for_the_parser(text: str) -> str:
    """The text with decimals as fractions, plain powers braced, degrees of angles worked in, word macros unwrapped."""
    if TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"(\\frac{\1 \\pi}{180})", text)
    text = _ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", text)
    text = _E_NOTATION.sub(lambda match: _as_fraction(match.group().replace("E", "e")), text)
    text = _DECIMAL.sub(lambda match: _as_fraction(match.group()), text)
    text = _PLAIN_POWER.sub(r"^{\1}", text)
    text = _LONG_POWER.sub(r"^{\1}", text)
    text = _written_out_products(text)
    text = re.sub(r"\\text ?\{ ?([a-zA-Z]) ?\}", r"\1", text)
    text = re.sub(r"_ ?\{ ?\\text ?\{([^{}]*)\} ?\}", r"_{\1}", text)
    text = re.sub(r"\^\\circ", "", text)
    return text.replace("*", r" \cdot ").replace("%", "")


def _written_out_products(text: str) -> str:
    """`2(3)` as a product and `2 1/3` as a sum: the parser takes all numbers side by side for mixed ones.

    Raises NotAnExpression for two numbers with nothing but a blank in between.
    """
    text = _MIXED.sub(lambda match: _mixed(*match.groups()), text)
    text = _BEFORE_BRACKET.sub(r"\1 \\cdot ", text)
    text = _BETWEEN_BRACKETS.sub(r") \\cdot ", text)
    if _NUMBERS_APART.search(text):
        raise NotAnExpression(f"{text[:80]!r}: two numbers without a sign between them")
    return text


def _mixed(whole: str, above: str, below: str) -> str:
    if int(above) >= int(below):
        return rf"{whole} \cdot \frac{{{above}}}{{{below}}}"
    return rf"({whole} + \frac{{{above}}}{{{below}}})"


def _as_fraction(number: str) -> str:
    value = parse_number(number)
    if value is None:
        return number
    if value.denominator == 1:
        return str(value.numerator)
    return rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"


def _complex_unit(expression: Any) -> Any:
    """The expression with the symbol i as the imaginary unit."""
    import sympy

    if not hasattr(expression, "free_symbols"):
        raise NotAnExpression(f"a {type(expression).__name__}")
    units = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.subs(units) if units else expression


def _split_equation(text: str) -> tuple[str, str] | None:
    sides = split_top_level(text, re.compile("="))
    return (sides[0], sides[-1]) if len(sides) > 1 else None


def _difference(sides: tuple[str, str]) -> Any:
    left, right = parse(sides[0]), parse(sides[1])
    try:
        return left - right
    except TypeError as error:
        raise NotAnExpression(f"{sides[0]} - {sides[1]}: {error}") from error


def _equal(truth: Any, answer: Any, tolerance: float) -> bool:
    if truth == answer:
        return not truth.has(*_no_values())
    names = _variables(truth) | _variables(answer)
    decided = False
    for sign in (1, -1) if names else (1,):
        for point in range(POINTS if names else 1):
            place = {name: _coordinate(name, point, sign) for name in names}
            values = _value(truth, place), _value(answer, place)
            if sign < 0 and not _are_real(values, (truth, answer), place):
                continue  # roots and logarithms of negative numbers follow other rules
            if values[0] is None or values[1] is None:
                return _verdict_of_library(truth, answer)
            if not _close(values[0], values[1], tolerance):
                return False
            decided = True
    return decided and (not names or _same_far_out(truth, answer, names, tolerance))


def _same_far_out(truth: Any, answer: Any, names: set[str], tolerance: float) -> bool:
    """Whether expressions that change their form somewhere (`|x - 3|`) agree beyond all numbers that stand in them."""
    import sympy

    changing = (sympy.Abs, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min, sympy.sign, sympy.Piecewise, sympy.Mod)
    powers = truth.atoms(sympy.Pow) | answer.atoms(sympy.Pow)
    even_root = any(power.exp.is_Rational and power.exp.q % 2 == 0 for power in powers)
    if not (even_root or truth.has(*changing) or answer.has(*changing)):
        return True
    numbers = truth.atoms(sympy.Rational) | answer.atoms(sympy.Rational)
    scale = 1 + min(10**6, max((abs(int(number)) for number in numbers), default=0))
    for sign in (1, -1):
        place = {name: scale * _coordinate(name, 0, sign) * 2 for name in names}
        values = _value(truth, place), _value(answer, place)
        if not _are_real(values, (truth, answer), place):
            continue
        if not _close(values[0], values[1], tolerance):
            return False
    return True


def _proportional(truth: Any, answer: Any, tolerance: float) -> bool:
    """Whether one expression is a constant times the other, and neither is always zero."""
    names = _variables(truth) | _variables(answer)
    if _variables(truth) != _variables(answer):
        return False
    ratio = None
    for point in range(POINTS):
        place = {name: _coordinate(name, point, 1) for name in names}
        values = _value(truth, place), _value(answer, place)
        if values[0] is None or values[1] is None:
            return _verdict_of_library(truth, answer)
        if values[1] == 0 or values[0] == 0:
            return False
        if ratio is not None and not _close(values[0] / values[1], ratio, tolerance):
            return False
        ratio = values[0] / values[1]
    return bool(names)


def _no_values() -> tuple[Any, ...]:
    import sympy

    return sympy.zoo, sympy.nan


def _variables(expression: Any) -> set[str]:
    return {symbol.name for symbol in expression.free_symbols}


def _coordinate(name: str, point: int, sign: int) -> Fraction:
    """A number between 0.5 and 2.5 that depends on the variable's name and the point alone."""
    digest = hashlib.sha256(f"{name}/{point}".encode()).digest()
    return sign * (Fraction(1, 2) + Fraction(int.from_bytes(digest[:4], "big"), 2**31))


def _value(expression: Any, place: dict[str, Fraction]) -> Any:
    """The value as an mpmath number of PRECISION digits; None where there is none or it is no number."""
    import sympy

    substitutions = {
        symbol: sympy.Rational(place[symbol.name].numerator, place[symbol.name].denominator)
        for symbol in expression.free_symbols
    }
    try:
        value = expression.subs(substitutions).evalf(PRECISION)
        if not value.is_number or not value.is_finite:
            return None
        real, imaginary = value.as_real_imag()
        return _mpc(real, imaginary)
    except (AttributeError, TypeError, ValueError, NotImplementedError, ZeroDivisionError):
        return None


def _mpc(real: Any, imaginary: Any) -> Any:
    import mpmath

    with mpmath.workdps(PRECISION):
        value = mpmath.mpc(_part(real), _part(imaginary))
        return mpmath.mpc(value.real, 0) if abs(value.imag) < abs(value) * mpmath.mpf(10) ** (5 - PRECISION) else value


def _are_real(values: tuple[Any, Any], expressions: tuple[Any, Any], place: dict[str, Fraction]) -> bool:
    if any(value is None or abs(value.imag) > 0 for value in values):
        return False
    return not any(_leaves_the_reals(expression, place) for expression in expressions)


def _leaves_the_reals(expression: Any, place: dict[str, Fraction]) -> bool:
    """Whether the value there comes of a root or logarithm of something that is negative."""
    import sympy

    roots = [power.base for power in expression.atoms(sympy.Pow) if power.exp.is_integer is not True]
    logarithms = [logarithm.args[0] for logarithm in expression.atoms(sympy.log)]
    inner = [_value(part, place) for part in (*roots, *logarithms) if part.free_symbols]
    return any(value is None or value.real < 0 or abs(value.imag) > 0 for value in inner)


def _part(number: Any) -> Any:
    """The part as an mpmath number; what cancels to nothing keeps one bit of rounding, and is zero."""
    return 0 if getattr(number, "_prec", 0) == 1 else number._to_mpmath(140)


def _close(first: Any, second: Any, tolerance: float) -> bool:
    import mpmath

    with mpmath.workdps(PRECISION):
        return bool(abs(first - second) <= tolerance * max(abs(first), abs(second)))


def _verdict_of_library(truth: Any, answer: Any) -> bool:
    """math-verify's own verdict, for what has no values (functions without a name, derivatives, sets)."""
    from math_verify import verify

    return bool(verify(truth, answer, float_rounding=15, strict=True, timeout_seconds=None))
