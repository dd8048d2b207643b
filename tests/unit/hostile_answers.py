"""Answers made to hang, to eat memory or to break a grader. Each has the ground truth that it is graded against."""

from __future__ import annotations

NEST = 300

HOSTILE_ANSWERS: list[tuple[str, str]] = [
    ("9^{9^{9}}", "1"),
    ("10^{10^{10}}", "7"),
    ("9^{9^{9^{9}}}", "9"),
    ("2^{1000000000}", "3"),
    ("(2^{99999})^{99999}", "x"),
    ("((((10^{99})^{99})^{99})^{99})^{99}", "y+1"),
    (r"\sqrt{\sqrt{2}+\sqrt{3}}^{1000000}", r"\sqrt{2}"),
    (r"\left(\sqrt{2}+\sqrt{3}\right)^{99999}", r"\sqrt{5}"),
    ("(10^{10^{10}})!", "1"),
    ("1000000!", "1"),
    ("99999!", r"\pi"),
    ("(9999!)!", "4"),
    ("((9!)!)!", "5"),
    ("10^{1000000000}-10^{999999999}", "2"),
    (r"\int_0^1 x^x \sin(\tan(x)) e^{x^{x^x}} dx", "1"),
    (r"\int_0^\infty \frac{\sin(x^3)\ln(x+1)}{1+x^{x}} dx", r"\pi"),
    (r"\int e^{x^2}\cos(x^3)\sqrt{x^4+1} dx", "x"),
    (r"\sum_{k=1}^{100000000} \frac{1}{k^k}", "1"),
    (r"\sum_{k=1}^{\infty} \frac{\sin(k^k)}{k!}", "e"),
    (r"\prod_{k=1}^{100000000} (1+\frac{1}{k^2})", "2"),
    (r"\lim_{x\to 0} \frac{\sin(\tan(x))-\tan(\sin(x))}{x^7}", "1"),
    (r"\gcd(2^{99999}-1, 3^{99999}-1)", "1"),
    (r"\binom{100000000}{50000000}", "2"),
    ("(x+1)^{99999}", "x"),
    ("(x+y+z+w)^{9999}-(x+y)^{9999}", "x"),
    ("+".join(f"x_{{{k}}}^{{{k}}}" for k in range(100)), "0"),
    ("(" * NEST + "1+x" + ")" * NEST, "1"),
    (r"\sqrt{" * NEST + "2" + "}" * NEST, "1"),
    (r"\frac{1}{" * 39 + "2" + "}" * 39, "1"),
    ("[" * 100_000, "1"),
    ("9" * 200_000, "1"),
    ("x+" * 100_000 + "1", "1"),
    ("1," * 100_000 + "1", "1"),
    (r"\pm" * 30 + "1", "1"),
    (",".join(["x+1"] * 600), ",".join(["1+x"] * 600)),
    (
        r"\begin{pmatrix}"
        + r"\\".join("&".join(f"a_{{{i}{j}}}" for j in range(9)) for i in range(9))
        + r"\end{pmatrix}",
        "1",
    ),
    (
        r"\det\begin{pmatrix}"
        + r"\\".join("&".join("abcdefghi"[j] + "^" + str(i) for j in range(9)) for i in range(9))
        + r"\end{pmatrix}",
        "1",
    ),
    ("x^{" * 38 + "x" + "}" * 38, "x"),
    (r"\sin(" * 38 + "x" + ")" * 38, "x"),
    ("\x00\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace") + "\\" * 5000, "1"),
    (r"\text{" * 1000, "1"),
    ("2^{2^{2^{2^{2^{2}}}}}", "1"),
]
