"""Values that cross between judge and program as JSON: plain data by value, everything else as a handle.

What comes from the program is only ever data: no class of the program's, so no `__eq__` of its own, reaches the judge.
"""

import json

LARGEST_MESSAGE = 32 * 2**20  # bytes
DEEPEST = 200


class TooLarge(Exception):
    """A message that no honest program needs."""


def encode(value, to_handle, depth=0):
    """The JSON form of a value; `to_handle(value)` gives the form of what is no plain data."""
    if depth > DEEPEST:
        raise TooLarge("nested too deeply")
    if value is None or value is True or value is False or type(value) is str:
        return value
    kind = type(value)
    if isinstance(value, int):  # an enumeration's member or another kind of int goes by its value
        value = int.__int__(value)
        return value if abs(value) < 2**53 else {"i": hex(value)}
    if isinstance(value, float):
        return {"f": float.__repr__(value)}
    if kind is complex:
        return {"c": [repr(value.real), repr(value.imag)]}

    def inner(item):
        return encode(item, to_handle, depth + 1)

    if isinstance(value, list):
        return {"l": [inner(item) for item in value]}
    if isinstance(value, tuple):
        items = [inner(item) for item in tuple.__iter__(value)]
        fields = getattr(kind, "_fields", None)
        return {"t": items} if fields is None else {"named": [kind.__name__, list(fields), items]}
    if isinstance(value, dict):
        return {"d": [[inner(key), inner(item)] for key, item in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"s": [inner(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if kind.__name__ in ("Fraction", "Decimal") and kind is _exact_kind(kind.__name__):
        return {"n": [kind.__name__, str(value)]}
    if isinstance(value, str):
        return str.__str__(value)
    if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return inner(value.item())
    return to_handle(value)


def decode(form, from_handle):
    """The value of a JSON form; `from_handle(form)` gives that of a handle."""
    if not isinstance(form, dict):
        return form
    ((tag, content),) = form.items()

    def inner(item):
        return decode(item, from_handle)

    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float(content)
    if tag == "c":
        return complex(float(content[0]), float(content[1]))
    if tag == "l":
        return [inner(item) for item in content]
    if tag == "t":
        return tuple(inner(item) for item in content)
    if tag == "named":
        import collections

        name, fields, items = content
        return collections.namedtuple(name, fields, rename=True)(*map(inner, items))
    if tag == "d":
        return {inner(key): inner(item) for key, item in content}
    if tag == "s":
        return {inner(item) for item in content}
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "n":
        return _exact_kind("Fraction" if content[0] == "Fraction" else "Decimal")(content[1])
    return from_handle(form)


def _exact_kind(name):
    """The class Fraction or Decimal, whose modules take long to import and are seldom needed."""
    if name == "Fraction":
        import fractions

        return fractions.Fraction
    import decimal

    return decimal.Decimal


def send(stream, message):
    """Nothing; writes one message to a binary stream."""
    body = json.dumps(message).encode()
    if len(body) > LARGEST_MESSAGE:
        raise TooLarge("more than 32 MiB at once")
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


def receive(stream):
    """The next message of a binary stream. Raises EOFError at its end, TooLarge for an absurd length."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    size = int.from_bytes(head, "little")
    if size > LARGEST_MESSAGE:
        raise TooLarge("more than 32 MiB at once")
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return json.loads(body)
