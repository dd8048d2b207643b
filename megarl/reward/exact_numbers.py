"""Exact values of the ways in which a number is written as an answer."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST_NUMBER = 1000  # characters; longer ones have no value here and are compared as text
LARGEST_EXPONENT = 4000  # of 10 in scientific notation
LARGEST_POWER_BITS = 100_000  # of an integer power that is worked out

_DECIMAL = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?(?:\.\d*)?")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar) ?\{(\d+)\}")
_FRACTION = re.compile(r"\\frac\{(-?[^{}]+)\}\{(-?[^{}]+)\}")
_MIXED = re.compile(r"(\d+) ?\\frac\{(\d+)\}\{(\d+)\}|(\d+) (\d+) ?/ ?(\d+)")
_SCIENTIFIC = re.compile(r"(.*?)(?: ?(?:\\times|\\cdot|\*|x) ?)?(?<![\d.])10 ?\^ ?(?:\{ ?([-+]?\d+) ?\}|(-?\d+))")
_E_NOTATION = re.compile(r"(\d*\.?\d+|\d+\.)[eE]([-+]?\d+)")
_POWER = re.compile(r"(\d+) ?\^ ?(?:\{ ?(\d+) ?\}|(\d))")


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of a normalised number, else None.

    Integers, decimals (thousands separated by commas or spaces), `a/b`, `\frac{a}{b}`, mixed numbers, repeating
    decimals with `\overline`, scientific notation, integer powers.
    """
    text = text.strip()
    if not text or len(text) > LONGEST_NUMBER:
        return None
    sign = 1
    if text[0] in "+-":
        sign, text = (-1 if text[0] == "-" else 1), text[1:].strip()
    value = _unsigned(text)
    return None if value is None else sign * value


def significant_digits(text: str) -> int:
    """Digits of a plain decimal from its first non-zero one on; 0 for whatever is not written with a decimal point."""
    plain = text.strip().lstrip("+-")
    if not re.fullmatch(r"\d*\.\d+", plain):
        return 0
    return len(plain.replace(".", "").lstrip("0"))


def _unsigned(text: str) -> Fraction | None:
    if not text or not (text[0].isdigit() or text[0] in ".\\"):
        return None
    plain = _decimal(text)
    if plain is not None:
        return plain
    for read in (_repeating, _mixed, _ratio, _e_notation, _scientific, _power):
        value = read(text)
        if value is not None:
            return value
    return None


def _decimal(text: str) -> Fraction | None:
    if not _DECIMAL.fullmatch(text) or not any(symbol.isdigit() for symbol in text):
        return None
    return Fraction(text.replace(",", "").replace(" ", ""))


def _signed_decimal(text: str) -> Fraction | None:
    text = text.strip()
    negative = text.startswith("-")
    value = _decimal(text.lstrip("-").strip()) if text.count("-") <= 1 else None
    return -value if value is not None and negative else value


def _repeating(text: str) -> Fraction | None:
    match = _REPEATING.fullmatch(text)
    if not match:
        return None
    whole, fixed, period = match.groups()
    scale = 10 ** len(fixed)
    return Fraction(int((whole + fixed) or "0")) / scale + Fraction(int(period), scale * (10 ** len(period) - 1))


def _mixed(text: str) -> Fraction | None:
    match = _MIXED.fullmatch(text)
    if not match:
        return None
    whole, above, below = (int(group) for group in match.groups() if group is not None)
    return None if below == 0 else whole + Fraction(above, below)


def _ratio(text: str) -> Fraction | None:
    fraction = _FRACTION.fullmatch(text)
    above, below = fraction.groups() if fraction else text.split("/") if text.count("/") == 1 else ("", "")
    numerator, denominator = _signed_decimal(above), _signed_decimal(below)
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def _e_notation(text: str) -> Fraction | None:
    match = _E_NOTATION.fullmatch(text)
    if not match or len(match.group(2)) > 6 or abs(int(match.group(2))) > LARGEST_EXPONENT:
        return None
    return Fraction(match.group(1)) * Fraction(10) ** int(match.group(2))


def _scientific(text: str) -> Fraction | None:
    match = _SCIENTIFIC.fullmatch(text)
    if not match:
        return None
    mantissa = _unsigned(match.group(1).strip()) if match.group(1).strip() else Fraction(1)
    exponent = match.group(2) or match.group(3)
    if mantissa is None or len(exponent) > 6 or abs(int(exponent)) > LARGEST_EXPONENT:
        return None
    return mantissa * Fraction(10) ** int(exponent)


def _power(text: str) -> Fraction | None:
    match = _POWER.fullmatch(text)
    if not match:
        return None
    base, exponent = int(match.group(1)), match.group(2) or match.group(3)
    if len(exponent) > 6 or base.bit_length() * int(exponent) > LARGEST_POWER_BITS:
        return None
    return Fraction(base ** int(exponent))
