"""Answers as structures (numbers, tuples, sets, intervals, equations, matrices, words) and their equality.

Leaves are compared exactly where both are numbers or words; only two different expressions need the mathematics
library, which is handed in as a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megarl.reward.asked import CALCULATION, NAME, asked_for
from megarl.reward.exact_numbers import parse_number, significant_digits
from megarl.reward.notation import closing_place, split_top_level, without_blanks
from megarl.reward.units import Measured, split_unit

Percent = Literal["either", "unit", "value"]
SameExpression = Callable[[str, str], bool]

DOUBLE_DIGITS = 15  # a decimal with so many significant digits is taken for the print of a double ...
DOUBLE_ERROR = Fraction(2, 10**15)  # ... which may be off by this much, relatively
MOST_ITEMS = 64  # of an unordered collection; longer ones are compared in order

_COMMA = re.compile(r"[,;]")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")
_WORD_AND = re.compile(
    r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|\\(?:lor|land)(?![a-zA-Z])|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z]))\s*"
)
_RELATION = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<=|>=|<|>")
_EQUALS = re.compile(r"(?<![<>!:])=(?!=)|\\equiv(?![a-zA-Z])")
_IN = re.compile(r"\\in(?![a-zA-Z])")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_BASED = re.compile(
    r"(\d[\da-fA-F]*|[\dA-F]{2,}(?= ?_ ?\{? ?\d\d)) ?_ ?(?:\{ ?(?:\\text\{ ?)?(\d+)(?: ?\})? ?\}|(\d+))"
)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:/\d+|\\pi|[a-z])?")
_CONDITION = re.compile(
    rf"({NAME.pattern}) ?(?:\\in ?\\mathbb ?\{{? ?R ?\}}? ?)?(?:\\mid(?![a-zA-Z])|\||:) ?(.*)", re.DOTALL
)
_REALS = re.compile(r"\\mathbb ?\{? ?R ?\}?|(?:the set of )?all real(?:s| numbers)(?: x)?")
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer):? )?\(? ?([A-J]) ?(?:\)|[.:](?= |$)|$)(.*)", re.DOTALL)
_RATIO = re.compile(r"[^:]+(?: ?: ?[^:]+)+")
_WORD = re.compile(r"[a-zA-Z]{4,}")
_SHORT_WORDS = {"no", "on", "up", "it", "he", "me", "we", "us", "in", "to", "of", "at", "by", "so"}


@dataclass(frozen=True)
class Leaf:
    """A single expression or number."""

    measured: Measured
    text: str


@dataclass(frozen=True)
class Words:
    """A text answer, lower-case, single-spaced."""

    text: str


@dataclass(frozen=True)
class Collection:
    """Several answers. Brackets as written: `{` set, `(`, `[` tuple or interval, empty for a bare list."""

    left: str
    items: tuple[Node, ...]
    right: str
    thousands: str = ""  # the text, where a bare list of numbers could also be one number with separators


@dataclass(frozen=True)
class Union:
    """Pieces of the number line."""

    pieces: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of entries."""

    rows: tuple[tuple[Node, ...], ...]
    determinant: bool = False  # written between bars


@dataclass(frozen=True)
class Equation:
    """Two sides; a `name` when the left one is only a name for the right one, or a calculation."""

    name: str | None
    left: Node
    right: Node
    sides: tuple[str, str]


@dataclass(frozen=True)
class Inequality:
    """`low < high` or `low <= high` that is no interval of one variable."""

    low: str
    high: str
    strict: bool


@dataclass(frozen=True)
class Interval:
    """An interval that was written as an inequality: knows its variable."""

    name: str
    interval: Collection


@dataclass(frozen=True)
class Based:
    """Digits with the base as a subscript."""

    digits: str
    base: int


@dataclass(frozen=True)
class Ratio:
    """Parts between colons: a ratio or a time, never a quotient."""

    parts: tuple[Node, ...]


Node = Leaf | Words | Collection | Union | Matrix | Equation | Inequality | Interval | Based | Ratio
NEGATIVE_INFINITY, INFINITY = r"-\infty", r"\infty"


def parse_answer(text: str) -> Node:
    """The structure of a normalised answer. Its cost grows with length times bracket depth."""
    matrix = _MATRIX.fullmatch(text.strip())
    if matrix:
        rows = [row for row in re.split(r"\\\\", matrix.group(2)) if row.strip()]
        cells = tuple(tuple(parse_answer(cell.strip()) for cell in row.split("&")) for row in rows)
        return Matrix(cells, determinant=matrix.group(1)[0] in "vV")
    pieces = split_top_level(text, _CUP)
    if len(pieces) > 1:
        return Union(tuple(parse_answer(piece) for piece in pieces))
    items = _list_items(text)
    if len(items) > 1:
        return _bare_list(text, items)
    return _single(text)


def _list_items(text: str) -> list[str]:
    connected = _WORD_AND.sub(",", text) if _WORD_AND.search(text) else text
    items = [item for item in split_top_level(connected, _COMMA) if item]
    return items or [text]


def _bare_list(text: str, items: Sequence[str]) -> Node:
    if _THOUSANDS.fullmatch(split_unit(text).value.replace(" ", "")) and ", " not in text:
        return Collection("", tuple(_single(item) for item in items), "", thousands=text)
    nodes = _flatten([_single(item) for item in items])
    if all(isinstance(node, Interval | Inequality) for node in nodes) and "or" in text:
        return Union(tuple(node.interval if isinstance(node, Interval) else node for node in nodes))
    return Collection("", nodes, "")


def _flatten(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with the two values of each plus-or-minus side by side."""
    flat: list[Node] = []
    for node in nodes:
        flat += node.items if isinstance(node, Collection) and node.left == "" and not node.thousands else [node]
    return tuple(flat)


def _single(text: str) -> Node:
    """The structure of a piece without commas outside brackets."""
    text = text.strip()
    if re.search(r"\\[pm]{2}(?![a-zA-Z])", text) and ("\\pm" in text or "\\mp" in text) and not _bracketed(text):
        upper = re.sub(r"\\pm(?![a-zA-Z])", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
        lower = re.sub(r"\\pm(?![a-zA-Z])", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
        return Collection("", (_single(upper), _single(lower)), "")
    if _REALS.fullmatch(_words(text)) or _REALS.fullmatch(text):
        return Collection("(", (_single(NEGATIVE_INFINITY), _single(INFINITY)), ")")
    if text == "\\emptyset":
        return Collection("{", (), "}")
    sides = split_top_level(text, _IN)
    if len(sides) == 2 and NAME.fullmatch(sides[0]):
        return parse_answer(sides[1])
    for read in (_relation, _equation, _bracketed, _based, _ratio):
        node = read(text)
        if node is not None:
            return node
    return Words(_words(text)) if _is_text(text) else Leaf(split_unit(text), text)


def _bracketed(text: str) -> Node | None:
    """A set, tuple or interval when one pair of brackets encloses the whole."""
    escaped = text.startswith("\\{")
    opening = 1 if escaped else 0
    if text[opening : opening + 1] not in ("(", "[", "{") or (text.startswith("{") and not escaped):
        return None
    closing = closing_place(text, opening)
    if closing != len(text) - 1:
        return None
    inner = text[opening + 1 : closing].strip()
    left, right = text[opening], text[closing]
    if escaped:
        inner = inner.removesuffix("\\").strip()
        if re.search(r"\\mid(?![a-zA-Z])|\||(?<!\d):", inner):
            return _set_by_condition(text, inner)
        items = [item for item in split_top_level(_WORD_AND.sub(",", inner), _COMMA) if item]
        return Collection("{", _flatten([_single(item) for item in items]), "}")
    items = [item for item in split_top_level(inner, _COMMA) if item]
    if len(items) < 2:
        return parse_answer(inner) if inner and (left, right) in (("(", ")"), ("[", "]")) else None
    if (left, right) == ("[", "]") and len(items) > 2:
        left, right = "(", ")"  # no interval
    return Collection(left, tuple(_single(item) for item in items), right)


def _set_by_condition(text: str, inner: str) -> Node:
    """The interval that the condition describes, or the text."""
    condition = _CONDITION.fullmatch(inner)
    node = parse_answer(condition.group(2)) if condition else None
    if condition and (isinstance(node, Union) or (isinstance(node, Interval) and node.name == condition.group(1))):
        return node.interval if isinstance(node, Interval) else node
    return Words(_words(text))


def _relation(text: str) -> Node | None:
    """An inequality, as an interval where one variable lies between bounds."""
    parts = split_top_level(text, _RELATION)
    if len(parts) not in (2, 3) or not all(parts):
        return None
    signs = _top_level_signs(text)
    if len(signs) != len(parts) - 1 or len({sign[0] for sign in signs}) != 1:
        return None
    strict = [len(sign) == 1 for sign in signs]
    if signs[0][0] == ">":
        parts, strict = parts[::-1], strict[::-1]
    if len(parts) == 3:
        low, name, high = parts
        return _interval(name, low, high, strict[0], strict[1]) if NAME.fullmatch(name) else None
    low, high = parts
    if NAME.fullmatch(low) and not NAME.fullmatch(high):
        return _interval(low, NEGATIVE_INFINITY, high, True, strict[0])
    if NAME.fullmatch(high) and not NAME.fullmatch(low):
        return _interval(high, low, INFINITY, strict[0], True)
    return Inequality(low, high, strict[0])


def _top_level_signs(text: str) -> list[str]:
    """The relation signs outside brackets as `<`, `<=`, `>` or `>=`."""
    masked = list(text)
    depth = 0
    for place, symbol in enumerate(text):
        depth += symbol in "([{"
        masked[place] = symbol if depth == 0 else " "
        depth -= symbol in ")]}"
    return [match.group().replace(r"\le", "<=").replace(r"\ge", ">=") for match in _RELATION.finditer("".join(masked))]


def _interval(name: str, low: str, high: str, open_low: bool, open_high: bool) -> Node:
    left, right = ("(" if open_low else "["), (")" if open_high else "]")
    return Interval(name.replace(" ", ""), Collection(left, (_single(low), _single(high)), right))


def _equation(text: str) -> Node | None:
    sides = split_top_level(text, _EQUALS)
    if len(sides) < 2 or not all(sides):
        return None
    first, last = sides[0], sides[-1]
    if len(sides) == 2 and NAME.fullmatch(last) and not NAME.fullmatch(first):
        first, last = last, first
    name = asked_for(first, last)
    if len(sides) > 2 and name is None:
        return None
    return Equation(name, _single(first), parse_answer(last), (first, last))


def _based(text: str) -> Node | None:
    match = _BASED.fullmatch(text)
    if not match:
        return None
    base = int(match.group(2) or match.group(3))
    return Based(match.group(1).lower().lstrip("0") or "0", base)


def _ratio(text: str) -> Node | None:
    parts = split_top_level(text, re.compile(":"))
    if len(parts) < 2 or not all(parts) or not any(symbol.isdigit() for symbol in text):
        return None
    return Ratio(tuple(_single(part) for part in parts))


def _is_text(text: str) -> bool:
    """Whether this is words and not an expression."""
    if not text:
        return True
    value = re.sub(r"_ ?\{ ?\\text ?\{[^{}]*\} ?\}", "", split_unit(text).value)
    if value.lower() in _SHORT_WORDS or "\\text" in value or "'" in value or "?" in value:
        return True
    bare = re.sub(r"\\[a-zA-Z]+", " ", value)
    only_letters = re.fullmatch(r"[a-zA-Z\s\-.]*[a-zA-Z]{3}[a-zA-Z\s\-.]*", bare) is not None
    return only_letters or _WORD.search(bare) is not None


def _words(text: str) -> str:
    plain = re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text)
    return " ".join(re.sub(r"[\"'`.,;:!?()]", " ", plain).lower().split())


@dataclass(frozen=True)
class Comparison:
    """How two structures are compared: the data set's conventions and the judge of expressions."""

    same_expression: SameExpression
    percent: Percent = "either"
    relative_tolerance: float = 0.0

    def same(self, truth: Node, answer: Node) -> bool:
        """Whether the answer is the truth. Raises whatever `same_expression` raises."""
        if isinstance(truth, Interval) and isinstance(answer, Interval):
            return truth.name == answer.name and self.same(truth.interval, answer.interval)
        truth = truth.interval if isinstance(truth, Interval) else truth
        answer = answer.interval if isinstance(answer, Interval) else answer
        if isinstance(truth, Equation) or isinstance(answer, Equation):
            return self._same_equation(truth, answer)
        if isinstance(truth, Matrix) != isinstance(answer, Matrix):
            truth, answer = _as_tuple(truth), _as_tuple(answer)
        if isinstance(truth, Collection) or isinstance(answer, Collection):
            return self._same_collection(_as_collection(truth), _as_collection(answer))
        match (truth, answer):
            case (Leaf(), Leaf()):
                return self._same_leaf(truth, answer)
            case (Words(), Words()):
                return truth.text != "" and truth.text == answer.text
            case (Based(), Based()):
                return truth == answer
            case (Union(), Union()):
                return self._same_unordered(truth.pieces, answer.pieces)
            case (Ratio(), Ratio()):
                return self._same_ordered(truth.parts, answer.parts)
            case (Inequality(), Inequality()):
                return truth.strict == answer.strict and self._same_inequality(truth, answer)
            case (Matrix(), Matrix()):
                alike = truth.determinant == answer.determinant and len(truth.rows) == len(answer.rows)
                return alike and all(map(self._same_ordered, truth.rows, answer.rows))
        return False

    def _same_leaf(self, truth: Leaf, answer: Leaf) -> bool:
        if without_blanks(truth.text) == without_blanks(answer.text):
            return True
        if None not in (truth.measured.unit, answer.measured.unit) and truth.measured.unit != answer.measured.unit:
            return False
        return any(self._same_value(*values) for values in self._readings(truth.measured, answer.measured))

    def _readings(self, truth: Measured, answer: Measured) -> list[tuple[str, str, Fraction]]:
        """(truth, answer, factor by which the answer's value is to be taken) for each allowed reading of percents."""
        scale = Fraction(answer.scale, truth.scale)
        if truth.percent == answer.percent:
            return [(truth.value, answer.value, scale)]
        as_value = Fraction(1, 100) if answer.percent else Fraction(100)
        readings = []
        if self.percent in ("either", "unit"):
            readings.append((truth.value, answer.value, scale))
        if self.percent in ("either", "value"):
            readings.append((truth.value, answer.value, scale * as_value))
        return readings

    def _same_value(self, truth: str, answer: str, factor: Fraction) -> bool:
        wanted, given = parse_number(truth), parse_number(answer)
        if wanted is not None and given is not None:
            return self._same_number(wanted, given * factor, truth, answer)
        if factor != 1:
            if wanted is None and given is None:
                return False
            answer = rf"\frac{{{factor.numerator}}}{{{factor.denominator}}} \cdot ({answer})"
        if without_blanks(truth) == without_blanks(answer):
            return True
        return self.same_expression(truth, answer)

    def _same_number(self, wanted: Fraction, given: Fraction, truth: str, answer: str) -> bool:
        if wanted == given:
            return True
        tolerance = Fraction(0)
        if (significant_digits(truth) >= DOUBLE_DIGITS) != (significant_digits(answer) >= DOUBLE_DIGITS):
            tolerance = DOUBLE_ERROR
        if self.relative_tolerance and significant_digits(truth) + ("e" in truth) + ("10" in truth and "^" in truth):
            tolerance = max(tolerance, Fraction(self.relative_tolerance))
        return abs(wanted - given) <= tolerance * abs(wanted)

    def _same_collection(self, truth: Collection, answer: Collection) -> bool:
        if truth.thousands or answer.thousands:
            return self._same_thousands(truth, answer)
        if len(truth.items) != len(answer.items):
            return False
        unordered = ("", "{")
        if truth.left in unordered and answer.left in unordered:
            return self._same_unordered(truth.items, answer.items)
        if (truth.left, truth.right) == (answer.left, answer.right):
            return self._same_ordered(truth.items, answer.items)
        # A bare list may leave out a tuple's parentheses, not a set's or an interval's.
        bare_and_tuple = {truth.left + truth.right, answer.left + answer.right} == {"", "()"}
        return bare_and_tuple and self._same_ordered(truth.items, answer.items)

    def _same_thousands(self, truth: Collection, answer: Collection) -> bool:
        """A list like `12,345` is one number where the other side is one, and else a list in this very order."""
        as_number = [_one_leaf(side) for side in (truth, answer)]
        if None not in as_number:
            return self.same(*as_number)  # type: ignore[arg-type]
        if truth.left or answer.left:
            return {truth.left, answer.left} == {"", "("} and self._same_ordered(truth.items, answer.items)
        return self._same_ordered(truth.items, answer.items)

    def _same_ordered(self, truth: Sequence[Node], answer: Sequence[Node]) -> bool:
        return len(truth) == len(answer) and all(self.same(a, b) for a, b in zip(truth, answer, strict=True))

    def _same_unordered(self, truth: Sequence[Node], answer: Sequence[Node]) -> bool:
        if len(truth) != len(answer):
            return False
        if len(truth) > MOST_ITEMS:
            return self._same_ordered(truth, answer)
        left = list(answer)
        for wanted in truth:
            # Equality is transitive but for double-precision decimals, so the first match will do.
            found = next((place for place, given in enumerate(left) if self.same(wanted, given)), None)
            if found is None:
                return False
            left.pop(found)
        return True

    def _same_equation(self, truth: Node, answer: Node) -> bool:
        if isinstance(truth, Equation) and isinstance(answer, Equation):
            if truth.name and truth.name == answer.name:
                return self.same(truth.right, answer.right)
            if self.same(truth.left, answer.left) and self.same(truth.right, answer.right):
                return True
            if self.same(truth.left, answer.right) and self.same(truth.right, answer.left):
                return True
            if any(isinstance(node, Words) for node in (truth.left, truth.right, answer.left, answer.right)):
                return False
            return self.same_expression(_EQUATION.join(truth.sides), _EQUATION.join(answer.sides))
        equation, other = (truth, answer) if isinstance(truth, Equation) else (answer, truth)
        assert isinstance(equation, Equation)
        if equation.name is None or (equation.name == CALCULATION and not self.same(equation.left, equation.right)):
            return False
        return self.same(equation.right, other) if equation is truth else self.same(other, equation.right)

    def _same_inequality(self, truth: Inequality, answer: Inequality) -> bool:
        return self.same(_single(truth.low), _single(answer.low)) and self.same(
            _single(truth.high), _single(answer.high)
        )


_EQUATION = " = "


def _as_collection(node: Node) -> Collection:
    return node if isinstance(node, Collection) else Collection("", (node,), "")


def _as_tuple(node: Node) -> Node:
    """A matrix of one row or column as the tuple of its entries; anything else as it is."""
    if not isinstance(node, Matrix) or node.determinant or (len(node.rows) > 1 and max(map(len, node.rows)) > 1):
        return node
    return Collection("(", tuple(cell for row in node.rows for cell in row), ")")


def _one_leaf(collection: Collection) -> Node | None:
    """What a collection is as one number, or None when it is several things."""
    if collection.thousands:
        number = collection.thousands.replace(",", "")
        return Leaf(split_unit(number), number)
    return collection.items[0] if len(collection.items) == 1 and collection.left == "" else None


def choice_letter(text: str) -> str | None:
    r"""The letter A to J of a multiple-choice answer: `E`, `(E)`, `\text{E}`, `E. 12`; None for other answers."""
    plain = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text).strip()
    match = _CHOICE.fullmatch(plain)
    return match.group(1) if match else None
