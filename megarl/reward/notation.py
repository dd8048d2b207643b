"""One way of writing for many: answers without LaTeX layout, Unicode look-alikes and closing punctuation."""

from __future__ import annotations

import re
import unicodedata

_LOOK_ALIKES = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "—": "-",
        "‐": "-",
        "×": r"\times ",
        "⋅": r"\cdot ",
        "·": r"\cdot ",
        "÷": "/",
        "∕": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "°": r"^\circ ",
        "≤": r"\le ",
        "⩽": r"\le ",
        "≥": r"\ge ",
        "⩾": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "±": r"\pm ",
        "∅": r"\emptyset ",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "λ": r"\lambda ",
        "μ": r"\mu ",
        "’": "'",
        "′": "'",
        "“": '"',
        "”": '"',
        "。": ".",
        "，": ",",
        "、": ",",
        "：": ":",
        "；": ";",
        "（": "(",
        "）": ")",
    }
)
_CHOOSE = re.compile(r"\{ ?([^{}]*?) ?\\choose(?![a-zA-Z]) ?([^{}]*?) ?\}")
_ORDINAL = re.compile(r"(?<=\d) ?\^? ?\{? ?(?:\\text ?\{ ?)?(?:st|nd|rd|th)(?![a-zA-Z]) ?\}{0,2}")
_SEGMENT = re.compile(r"\\overline ?\{ ?([A-Z]{2}) ?\}")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SAME_COMMAND = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "sfrac"), "frac"),
    **dict.fromkeys(("mbox", "textrm", "textit", "textsf", "textbf", "mathrm", "textnormal", "hbox"), "text"),
    **dict.fromkeys(("leq", "leqslant", "leqq"), "le"),
    **dict.fromkeys(("geq", "geqslant", "geqq"), "ge"),
    **dict.fromkeys(("lt",), "<"),
    **dict.fromkeys(("gt",), ">"),
    "neq": "ne",
    "varnothing": "emptyset",
    "infin": "infty",
    "degree": "circ",
    "lbrace": "{",
    "rbrace": "}",
    "bigcup": "cup",
    "varphi": "phi",
    "varepsilon": "epsilon",
    "vartheta": "theta",
    **dict.fromkeys(("dots", "dotsc", "dotsb", "cdots"), "ldots"),
    **dict.fromkeys(("langle", "lparen"), "("),
    **dict.fromkeys(("rangle", "rparen"), ")"),
    "ast": "cdot",
}
_DROPPED_COMMANDS = (
    "left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|quad|qquad|enspace|thinspace|hspace\\{[^{}]*\\}|!"
)
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_LAYOUT = re.compile(rf"\\(?:{_DROPPED_COMMANDS})(?![a-zA-Z])")
_UNWRAPPED = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathnormal|boxed|fbox|emph|underline|operatorname)\*?\s*\{([^{}]*)\}"
)
_TEXT_WITHOUT_LETTERS = re.compile(r"\\text\s*\{([^a-zA-Z{}]*)\}")
_MATH_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|gcd|lcm|max|min"
_FUNCTION_TEXT = re.compile(rf"\\(?:text|operatorname)\s*\{{\s*({_MATH_FUNCTIONS})\s*\}}")
_BARE_FUNCTION = re.compile(rf"(?<![a-zA-Z\\])({_MATH_FUNCTIONS})(?![a-zA-Z])")
_GROUPED_DIGITS = re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\}|,\\!|\{\\,\})(?=\d{3}(?!\d))")
_DOUBLED_BACKSLASH = re.compile(r"\\\\(?=(?:circ|frac|sqrt|pi|cdot|times|text|left|right|infty)(?![a-zA-Z]))")
_TRAILING = " \t\n.,;:*$~"


def normalise(answer: str) -> str:
    r"""The answer in one canonical writing, spaces kept where they may matter.

    Fractions as `\frac{a}{b}`, roots as `\sqrt{a}`, text as `\text{...}`, inequalities as `<`, `>`, `\le`,
    `\ge`; without dollar signs, sizes, fonts, spacing and closing punctuation. Its cost grows linearly with the length.
    """
    text = _unicode(answer)
    text = _GROUPED_DIGITS.sub("", text)
    if "&" not in text:
        text = _DOUBLED_BACKSLASH.sub(r"\\", text)
    text = re.sub(r"\\\$|\\[()\[\]]|\$|USD|€|£", " ", text)
    text = text.replace("{,}", ",").replace(r"\%", "%").replace(r"\ ", " ").replace("~", " ").replace(r"\#", "#")
    text = re.sub(r"\\[,;:!]", " ", text)
    text = _COMMAND.sub(lambda match: _same_command(match.group(1)), text)
    text = _LAYOUT.sub(" ", text).replace(r"\.", "")
    text = _TEXT_WITHOUT_LETTERS.sub(r"\1", _FUNCTION_TEXT.sub(r"\\\1 ", text))
    for _ in range(4):
        text, changed = _UNWRAPPED.subn(r"\1", text)
        if not changed:
            break
    text = re.sub(r"\\text ?\{([^{}]*)\} ?/ ?\\text ?\{([^{}]*)\}", r"\\text{\1/\2}", text)
    text = text.replace("**", "^") if re.search(r"[\w)]\*\*[\w(]", text) else text.replace("**", " ")
    text = _BARE_FUNCTION.sub(r"\\\1 ", re.sub(r"\b(?:np|math)\.", "", text))
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ|(?<=\d)\s*\\circ(?![a-zA-Z])", r"^\\circ", text)
    text = re.sub(r"\+\s*\\infty", r"\\infty", text)
    text = _ORDINAL.sub("", _SEGMENT.sub(r"\1", _CHOOSE.sub(r"\\binom{\1}{\2}", text)))
    text = re.sub(r"\\dot ?\{(\d)\}", r"\\overline{\1}", text)
    text = re.sub(r"^\s*\\(?:approx|sim)(?![a-zA-Z])", "", text)
    text = _braced_arguments(text)
    return _strip(re.sub(r"\s+", " ", text))


def _unicode(answer: str) -> str:
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", answer)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda match: "_{" + match.group().translate(_SUBSCRIPTS) + "}", text)
    text = re.sub(r"√\s*(\d+|[a-zA-Z]|\([^()]*\))", r"\\sqrt{\1}", text)
    if text.isascii():
        return text
    # A vulgar fraction after a digit is a mixed number: keep the two apart.
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text.translate(_LOOK_ALIKES))
    return unicodedata.normalize("NFKC", text).replace("⁄", "/").translate(_LOOK_ALIKES)


def _same_command(name: str) -> str:
    other = _SAME_COMMAND.get(name, name)
    return other if other in "()" else other + " " if other in "<>" else "\\" + other


def _braced_arguments(text: str) -> str:
    r"""`\frac12`, `\frac1{2}`, `\sqrt2`, `\sqrt(2)` and `^12`-free forms with braces around their arguments."""
    text = (
        re.sub(r"\\(frac|sqrt|text)\s+", r"\\\1 ", text).replace(r"\frac {", r"\frac{").replace(r"\sqrt {", r"\sqrt{")
    )
    text = text.replace(r"\text {", r"\text{").replace(r"\sqrt [", r"\sqrt[")
    token = r"(\d|[a-zA-Z]|\\[a-zA-Z]+)"
    text = re.sub(rf"\\frac ?{token} ?{token}(?![a-zA-Z]*\{{)", r"\\frac{\1}{\2}", text)
    text = re.sub(rf"\\frac ?{token} ?\{{", r"\\frac{\1}{", text)
    text = re.sub(rf"(\\frac\{{[^{{}}]*\}}) ?{token}", r"\1{\2}", text)
    text = re.sub(r"\\frac\{([^{}]*)\} \{", r"\\frac{\1}{", text)
    text = re.sub(rf"\\sqrt ?{token}", r"\\sqrt{\1}", text)
    return re.sub(r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}", text)


def _strip(text: str) -> str:
    """The text without outer blanks, closing punctuation and braces around the whole."""
    while True:
        stripped = text.strip().rstrip(_TRAILING).lstrip("* \t:").rstrip("\\" if text.rstrip().endswith(" \\") else "")
        if stripped.startswith("{") and stripped.endswith("}") and closing_place(stripped, 0) == len(stripped) - 1:
            stripped = stripped[1:-1]
        stripped = stripped.removesuffix("\\")
        if stripped == text:
            return text
        text = stripped


def without_blanks(text: str) -> str:
    """The text without blanks, but for those that keep digits apart: `2 1/3` is no `21/3`."""
    return _IDLE_BLANKS.sub("", text)


_IDLE_BLANKS = re.compile(r"(?<![\d,]) +| +(?!\d)")
OPENING, CLOSING = "([{", ")]}"


def close_braces(text: str) -> str:
    """The text with the braces closed at its end that it leaves open: some data sets cut answers there."""
    plain = text.replace("\\{", "").replace("\\}", "")
    return text + "}" * (plain.count("{") - plain.count("}"))


def closing_place(text: str, opening: int) -> int | None:
    """Where the bracket at `opening` closes; round and square ones may close each other (half-open intervals)."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] in OPENING) - (text[place] in CLOSING)
        if depth == 0:
            return place
    return None


def split_top_level(text: str, separators: re.Pattern[str]) -> list[str]:
    """The pieces between the separators that stand outside all brackets, stripped; one piece when there is none."""
    depth, start, pieces, place = 0, 0, [], 0
    while place < len(text):
        symbol = text[place]
        if depth == 0:
            match = separators.match(text, place)
            if match:
                pieces.append(text[start:place].strip())
                place = start = match.end()
                continue
        depth += (symbol in OPENING) - (symbol in CLOSING)
        place += 1
    return [*pieces, text[start:].strip()]
