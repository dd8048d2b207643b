"""What stands around a number: units, currency, degrees, percent, scale words."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Different names of one unit, first the name that stands for all. Units outside the table are ignored.
_UNIT_NAMES = (
    "mm millimeter millimetre",
    "cm centimeter centimetre",
    "dm decimeter decimetre",
    "m meter metre",
    "km kilometer kilometre",
    "in inch inches",
    "ft foot feet",
    "yd yard",
    "mi mile",
    "mg milligram",
    "g gram",
    "kg kilogram",
    "lb lbs pound",
    "oz ounce",
    "ml mL milliliter millilitre",
    "L l liter litre",
    "ms millisecond",
    "s sec second",
    "min minute",
    "h hr hour",
    "day",
    "week",
    "month",
    "year yr",
    "mph",
    "kph",
    "Hz hertz",
    "N newton",
    "J joule",
    "W watt",
    "V volt",
    "A ampere amp",
    "K kelvin",
    "Pa pascal",
    "MB megabyte",
    "GB gigabyte",
    "KB kB kilobyte",
    "cent",
    "dollar USD",
    "degree deg",
    "radian rad",
    "unit",
    # Words that turn a number into another answer.
    *("am", "pm", "bc", "ad", "north", "south", "east", "west", "up", "down", "left", "right"),
    *("clockwise", "counterclockwise anticlockwise", "increase", "decrease", "profit gain", "loss"),
)
_CANONICAL = {name: names.split()[0] for names in _UNIT_NAMES for name in names.split()}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_CONNECTIVES = {"and", "or", "if", "when", "where", "for", "is", "are", "not", "no", "than", "with", "base"}

_POWER = r"(?:\^ ?(?:\{ ?-?[23] ?\}|-?[23]))?"
_WORDS = r"[a-zA-Z][a-zA-Z.\-]*(?: [a-zA-Z][a-zA-Z.\-]*){0,4}"
_TEXT_UNIT = re.compile(rf" ?\\text\{{ ?((?:{_WORDS}(?: ?/ ?{_WORDS})?{_POWER})?) ?\.?\}} ?({_POWER})$")
_PLAIN_UNIT = re.compile(rf" ?({_WORDS}(?: ?/ ?{_WORDS})?) ?({_POWER})$")
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r" ?\^\\circ ?([CF]?)$")


@dataclass(frozen=True)
class Measured:
    """An expression with what its writing says about its unit."""

    value: str
    unit: str | None = None  # canonical name of a known unit, its power included
    percent: bool = False
    scale: int = 1


def split_unit(text: str) -> Measured:
    r"""The expression without its unit: `10\text{ cm}`, `12 inches`, `30^\circ`, `5\%`, `3 million`.

    Plain letters count as a unit only when they are a known one of two letters or more, or a word after a blank:
    `3k` stays an expression.
    """
    text = text.strip()
    if text.endswith("%"):
        return Measured(text[:-1].strip(), percent=True) if _has_value(text[:-1]) else Measured(text)
    degrees = _DEGREES.search(text)
    if degrees and _has_value(text[: degrees.start()]) and not TRIGONOMETRIC.search(text):
        return Measured(text[: degrees.start()], unit="degree" + degrees.group(1))
    match = _TEXT_UNIT.search(text)
    if match is None:
        match = _PLAIN_UNIT.search(text)
        if match and not _is_plain_unit(text, match):
            match = None
    if match is None or not _has_value(text[: match.start()]):
        return Measured(text)
    return _measured(text[: match.start()].strip(), match.group(1).strip(), match.group(2).replace(" ", ""))


def _measured(value: str, words: str, power: str) -> Measured:
    names = re.sub(r" ?/ ?", "/", words.replace(".", "")).split()
    if any(name.lower() in _CONNECTIVES for name in names):
        return Measured(value + " " + words + power)
    if names and names[0].lower() in _SCALES:
        rest = _measured(value, " ".join(names[1:]), power)
        return Measured(value, rest.unit, rest.percent, _SCALES[names[0].lower()])
    if names and names[0].lower() in ("percent", "percentage", "pct"):
        return Measured(value, percent=True)
    return Measured(value, unit=_canonical_unit(names, power))


def _canonical_unit(names: list[str], power: str) -> str | None:
    powers = {"square": "2", "sq": "2", "cubic": "3"}
    digit = power.strip("^{} ")
    if len(names) > 1 and names[0].lower() in powers:
        digit, names = powers[names[0].lower()], names[1:]
    if len(names) != 1:
        return None
    if names[0].count("/") == 1:
        above, below = (_canonical_unit([part], "") for part in names[0].split("/"))
        return f"{above}/{below}" if above and below else None
    name = names[0]
    for candidate in (name, name.lower(), name.lower().removesuffix("s"), name.lower().removesuffix("es")):
        if candidate in _CANONICAL:
            unit = _CANONICAL[candidate]
            # "square units" only says what kind of thing is measured.
            return None if unit == "unit" else unit + digit
    return None


def _is_plain_unit(text: str, match: re.Match[str]) -> bool:
    words = match.group(1).split()
    first, before = words[0].strip("."), text[: match.start()]
    if not before or before[-1] in "\\_^" or not (before[-1].isdigit() or before[-1] in "})"):
        return False
    if before[-1] == "}" and not re.search(r"\d\}$", before):
        return False
    known = len(first) >= 2 and (_canonical_unit([first], "") is not None or first.lower() in _SCALES)
    known = known or (first == "of" and len(words) > 1)  # three quarters of a mile
    spaced = match.group().startswith(" ")
    return known or (spaced and len(first) >= 3 and re.search("[aeiouy]", first.lower()) is not None)


def _has_value(text: str) -> bool:
    return any(symbol.isdigit() for symbol in text) or re.search(r"\\(?:frac|sqrt|pi)(?![a-zA-Z])", text) is not None
