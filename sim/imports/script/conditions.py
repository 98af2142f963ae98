"""What a shell's conditions come to, as far as a script says: `[ ]`, `[[ ]]` and whole-number arithmetic."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TESTS = ("[", "[[", "test")
#: Largest number, so that no power or product takes long.
_LARGEST = 10**15
_LONGEST = 200
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}
_ORDERS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}
_EQUAL = ("=", "==", "!=")
#: Signs between two operands, those among them that only a running shell can judge included.
_BINARY = (*_EQUAL, *_COMPARED, "=~", "<", ">", "-nt", "-ot", "-ef")
_JOINED = {"||": "or", "&&": "and"}


@dataclass(frozen=True, slots=True)
class Operand:
    """A word of a test.

    Attributes:
        missing: a variable in it that nothing gives a value, "" if none; it counts as empty.
        unknown: whether it holds what only a running shell knows.
    """

    text: str
    missing: str = ""
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a condition comes to.

    Attributes:
        value: None where only a running shell knows.
        why: why it may be otherwise in a running shell, "" where the script alone decides.
    """

    value: bool | None
    why: str = ""

    def negated(self) -> Verdict:
        """The opposite."""
        return Verdict(None if self.value is None else not self.value, self.why)

    def both(self, other: Verdict) -> Verdict:
        """Whether both hold."""
        for one in (self, other):
            if one.value is False and not one.why:
                return one
        for value in (None, False):
            for one in (self, other):
                if one.value is value:
                    return one
        return Verdict(True, self.why or other.why)

    def either(self, other: Verdict) -> Verdict:
        """Whether one of them holds."""
        return self.negated().both(other.negated()).negated()


UNKNOWN = Verdict(None, "not known here")


def judge(words: Sequence[Operand]) -> Verdict:
    """What a test comes to, its first word `[`, `[[` or `test` included."""
    inner = list(words[1:])
    while inner and inner[-1].text in ("]", "]]"):
        inner.pop()
    return _Test(inner, words[0].text == "[[").read() if inner else Verdict(False)


class _Test:
    """Reads the words of a test: `-o` and `||` over `-a` and `&&` over `!`, parentheses, and single questions."""

    def __init__(self, words: list[Operand], double: bool) -> None:
        self.words, self.at, self.double, self.depth = words, 0, double, 0

    def read(self) -> Verdict:
        found = self._either()
        return found if self.at >= len(self.words) else UNKNOWN

    def _text(self, ahead: int = 0) -> str:
        return self.words[self.at + ahead].text if self.at + ahead < len(self.words) else ""

    def _either(self) -> Verdict:
        found = self._both()
        while self._text() in ("-o", "||"):
            self.at += 1
            found = found.either(self._both())
        return found

    def _both(self) -> Verdict:
        found = self._one()
        while self._text() in ("-a", "&&"):
            self.at += 1
            found = found.both(self._one())
        return found

    def _one(self) -> Verdict:
        self.depth += 1
        left = len(self.words) - self.at
        if not left or self.depth > _LONGEST:
            return UNKNOWN
        if left > 2 and self._text(1) in _BINARY:
            self.at += 3
            return self._compared(*self.words[self.at - 3:self.at])
        if self._text() == "!" and left > 1:
            self.at += 1
            return self._one().negated()
        if self._text() == "(" and left > 1:
            self.at += 1
            found = self._either()
            self.at += 1
            return found
        if left > 1 and re.fullmatch(r"-[a-zA-Z]", self._text()) and self._text() not in ("-a", "-o"):
            self.at += 2
            return self._asked(self.words[self.at - 2].text, self.words[self.at - 1])
        self.at += 1
        word = self.words[self.at - 1]
        if word.text in ("-n", "-z"):  # behind it stood a variable without a value
            return Verdict(word.text == "-z")
        return UNKNOWN if word.unknown else Verdict(bool(word.text))

    def _asked(self, sign: str, word: Operand) -> Verdict:
        """A question of one word. That a variable is empty where nothing gives it a value is what -n and -z ask."""
        if sign not in ("-n", "-z") or word.unknown:
            return UNKNOWN
        return Verdict(bool(word.text) == (sign == "-n"))

    def _compared(self, left: Operand, sign: Operand, right: Operand) -> Verdict:
        if left.unknown or right.unknown:
            return UNKNOWN
        missing = left.missing or right.missing
        why = f"{missing} has no value here" if missing else ""
        if sign.text in _EQUAL:
            same = fnmatch.fnmatchcase(left.text, right.text) if self.double else left.text == right.text
            return Verdict(same == (sign.text != "!="), "" if same else why)
        if sign.text not in _COMPARED:
            return UNKNOWN
        try:
            values = [int(one.text or ("0" if self.double else "")) for one in (left, right)]
        except ValueError:
            return Verdict(False, why) if why else UNKNOWN
        return Verdict(_COMPARED[sign.text](*values), why)


def whole(text: str) -> int:
    """The value of a whole-number expression, a comparison's 1 or 0.

    Raises:
        ValueError: it is none that is known here.
    """
    plain = re.sub(r"\|\||&&", lambda sign: f" {_JOINED[sign[0]]} ", text)
    plain = re.sub(r"!(?!=)", " not ", plain)
    if len(plain) > _LONGEST or re.search(r"\d[A-Za-z_]", plain):
        raise ValueError
    try:
        return _count(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        raise ValueError from None


def _count(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < _LARGEST:
        return int(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_count(node.operand)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return int(not _count(node.operand))
    if isinstance(node, ast.BoolOp):
        values = [bool(_count(one)) for one in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ORDERS:
        return int(_ORDERS[type(node.ops[0])](_count(node.left), _count(node.comparators[0])))
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        value = _ARITHMETIC[type(node.op)](_count(node.left), _count(node.right))
        if abs(value) < _LARGEST:
            return value
    raise ValueError
