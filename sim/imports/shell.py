"""Arguments out of a launch script, without running it.

Variables, arrays, defaults (`${NAME:-8}`), whole-number arithmetic, `if` and `case` on values that the script itself
says are followed as bash does in an empty environment; a test that needs a running shell fails. What only a running
shell knows (commands, the environment) stays as it is written, `$NAME`, and is a fault where a setting that matters
has it.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from sim.errors import Fault, UserError
from sim.imports.lexer import Piece, Raw, Simple, commands

#: Longest word, and all of a script's words together, in characters: more is no launch script.
_LONGEST, _MOST = 100_000, 5_000_000
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(
    r"\$(?:([A-Za-z_]\w*|[0-9@*#?!$-])|\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|\(\((.*?)\)\)|\((.*)\))|`[^`]*`", re.DOTALL)
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*]+)(\[[@*]\])?(?:(:?[-=])(.*))?\Z", re.DOTALL)
_DECLARES = ("export", "declare", "local", "readonly", "typeset", "eval", "set", "then", "do", "else", "{", "!", "time")
_TESTS = ("[", "[[", "test")
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}


@dataclass(frozen=True, slots=True)
class Word:
    """A word after substitution, at its line."""

    text: str
    line: int

    def split(self) -> Iterator[Word]:
        """The words within it."""
        for found in re.finditer(r"\S+", self.text):
            yield Word(found[0], self.line + self.text.count("\n", 0, found.start()))


@dataclass(slots=True)
class _Branch:
    """An open `if` or `case`: whether its present part is run, whether one was, and what `case` looks at."""

    live: bool = False
    done: bool = False
    tests: bool = True
    subject: str | None = None


@dataclass
class Script:
    """A script as far as it can be followed.

    Attributes:
        file: as the user named it.
        variables: name -> words; an array has several, anything else one.
        ran: the words of every command that is run.
    """

    file: str
    variables: dict[str, list[Word]] = field(default_factory=dict)
    ran: list[list[Word]] = field(default_factory=list)
    _branches: list[_Branch] = field(default_factory=list)
    _status: bool = True
    _spent: int = 0

    def follow(self, text: str) -> None:
        """All of a script's commands. Raises UserError."""
        behind = "\n"
        for command in commands(text):
            if not self._keyword(command, behind):
                skipped = (behind == "&&" and not self._status) or (behind == "||" and self._status)
                if self._live and not skipped and command.words:
                    self._status = self._run(command)
            behind = command.end

    @property
    def _live(self) -> bool:
        return all(branch.live for branch in self._branches)

    def _keyword(self, command: Simple, behind: str) -> bool:
        """Whether a command is no more than a word of the shell's grammar; opens, turns and closes branches."""
        first = command.words[0].plain if command.words else ""
        if first == "fi" or first == "esac":
            if self._branches:
                self._branches.pop()
            return True
        if first == "case":
            live = self._live
            subject = self.expand(command.words[1]) if len(command.words) > 1 else []
            self._branches.append(_Branch(not live, not live, False, subject[0].text if subject else ""))
            return True
        if self._branches and self._branches[-1].subject is not None and self._clause(command, behind):
            return True
        if first in ("if", "elif"):
            self._test(command, first == "if")
            return True
        if not self._branches:
            return first in ("while", "until", "for")
        branch = self._branches[-1]
        if first == "then":
            branch.tests = False
            branch.done = branch.done or branch.live
            command.words.pop(0)
        elif first == "else":
            branch.live, branch.done, branch.tests = not branch.done, True, False
            command.words.pop(0)
        elif branch.tests:  # a condition of several commands
            value = bool(self._tested(command))
            branch.live = (branch.live and value if behind == "&&" else branch.live or value if behind == "||"
                           else value) and not branch.done
            return True
        return first in ("while", "until", "for")

    def _test(self, command: Simple, opens: bool) -> None:
        """`if` and `elif`."""
        outside = self._live if opens else all(branch.live for branch in self._branches[:-1])
        if opens:
            self._branches.append(_Branch(done=not outside))
        if not self._branches:
            return
        branch = self._branches[-1]
        del command.words[0]
        branch.tests = True
        branch.live = not branch.done and bool(self._tested(command))

    def _clause(self, command: Simple, behind: str) -> bool:
        """Whether a command is a pattern of the `case` that is open."""
        branch = self._branches[-1]
        if behind == ";;":
            branch.live, branch.tests = False, False
        if command.end not in (")", "|") or not command.words or behind in ("(", "&&"):
            return False
        pattern = self.expand(command.words[-1])
        hit = bool(pattern) and fnmatch.fnmatchcase(branch.subject or "", pattern[0].text)
        branch.live = (branch.live or hit) and not branch.done if command.end == ")" or hit else branch.live
        if command.end == ")":
            branch.done = branch.done or branch.live
        return True

    def _run(self, command: Simple) -> bool:
        """One command: its assignments take hold, its words are kept. Whether it succeeds, as far as is known."""
        if command.words[0].plain in _TESTS:
            return bool(self._tested(command))
        words: list[Word] = []
        for position, raw in enumerate(command.words):
            if not words and (raw.plain in _DECLARES or (position and re.match(r"-[a-zA-Z]+\Z", raw.plain))):
                continue
            found = _ASSIGNED.match("".join(piece.text for piece in raw.pieces)) if not words else None
            if found and raw.pieces and not any(piece.quote for piece in raw.pieces[:len(found[0])]):
                self._assign(found[1], bool(found[2]), raw, len(found[0]), command.arrays.get(position))
            elif raw.pieces or words:
                words += self.expand(raw)
        if not words:
            return True
        if words[0].text != ":":
            self.ran.append(words)
        return True

    def _tested(self, command: Simple) -> bool | None:
        """What a condition comes to; None where only a running shell knows. A variable without a value is empty."""
        words = [word.text for raw in command.words for word in self.expand(raw, empty=True)]
        return _judge(words)

    def _assign(self, name: str, adds: bool, raw: Raw, skip: int, array: list[Raw] | None) -> None:
        if array is not None:
            value = [word for one in array for word in self.expand(one)]
        else:
            value = [Word("".join(self._text(piece) for piece in _joined(raw.pieces[skip:])), raw.line)]
        if adds:
            earlier = self.variables.get(name, [])
            plain = array is None and len(earlier) == 1
            value = [Word(earlier[0].text + value[0].text, earlier[0].line)] if plain else earlier + value
        self._spend(value, raw.line)
        self.variables[name] = value

    def _spend(self, words: Iterable[Word], line: int) -> None:
        """Counts characters, so that variables that double themselves come to an end. Raises UserError."""
        size = sum(len(word.text) for word in words)
        self._spent += size
        if size > _LONGEST or self._spent > _MOST:
            raise UserError(Fault("its variables grow too long for a launch script", "", self.file, line))

    def expand(self, raw: Raw, empty: bool = False) -> list[Word]:
        """The words that a word becomes.

        Args:
            empty: a variable without a value is empty, as in a test; else it stays as it is written.
        """
        done: list[Word] = []
        now: str | None = None
        line = raw.line  # of the word in the making
        for piece in _joined(raw.pieces):
            whole = _whole_array(piece, self.variables)
            if whole is not None:
                if now:
                    done.append(Word(now, line))
                done, now = done + whole, None
                continue
            for text, splits, at in self._parts(piece, raw.line, empty):
                if not splits:
                    now = (now or "") + text
                    continue
                inner = list(Word(text, at).split())
                if inner and not text[0].isspace() and now:
                    inner[0] = Word(now + inner[0].text, line)
                elif now:
                    done.append(Word(now, line))
                done, now = done + inner, None
                if done and not text[-1:].isspace() and inner:
                    now = done[-1].text
                    line = done.pop().line
        if now is not None:
            done.append(Word(now, line))
        self._spend(done, line)
        return done

    def _parts(self, piece: Piece, line: int, empty: bool) -> Iterator[tuple[str, bool, int]]:
        """(text, whether it is split into words, line) of a piece."""
        if piece.quote == "'" or len(piece.text) > _LONGEST // 5:
            yield piece.text, False, line
            return
        last = 0
        for found in _NAME.finditer(piece.text):
            if found.start() > last:
                yield piece.text[last:found.start()], False, line
            last = found.end()
            value = self._value(found)
            if value is None:
                yield ("" if empty else found[0]), False, line
            elif piece.quote:
                yield " ".join(word.text for word in value), False, line
            else:
                for word in value:
                    yield word.text, True, word.line
        if last < len(piece.text) or not piece.text:
            yield piece.text[last:], False, line

    def _text(self, piece: Piece) -> str:
        return "".join(text for text, _, _ in self._parts(replace(piece, quote=piece.quote or '"'), 0, False))

    def _value(self, found: re.Match[str]) -> list[Word] | None:
        """The words behind a substitution, None if nobody knows them here."""
        if found[3] is not None:
            return self._counted(found[3])
        if found[1] is not None:
            return [] if found[1] in "@*" else self.variables.get(found[1])
        braced = _BRACED.match(found[2]) if found[2] is not None else None
        if braced is None:
            return None
        value = self.variables.get(braced[1]) if braced[1] not in "@*" else []
        if braced[3] and (value is None or (braced[3][0] == ":" and not any(word.text for word in value))):
            value = [Word(self._text(Piece(braced[4].strip("\"'"), '"')), 0)]
            if braced[3].endswith("="):
                self.variables[braced[1]] = value
        return value

    def _counted(self, text: str) -> list[Word] | None:
        """The value of an arithmetic expression."""
        plain = self._text(Piece(text, '"'))
        plain = re.sub(r"[A-Za-z_]\w*", lambda name: "".join(
            word.text for word in self.variables.get(name[0], [])[:1]) or name[0], plain)
        if len(plain) > 200:
            return None
        try:
            return [Word(str(_count(ast.parse(plain.strip(), mode="eval").body)), 0)]
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Neighbouring letters outside quotes as one piece."""
    text = ""
    for piece in pieces:
        if piece.quote:
            if text:
                yield Piece(text)
            text = ""
            yield piece
        else:
            text += piece.text
    if text:
        yield Piece(text)


def _whole_array(piece: Piece, variables: Mapping[str, list[Word]]) -> list[Word] | None:
    """The words of an array that a piece names, each a word of its own; None if it names none."""
    found = re.fullmatch(r"\$\{(\w+)\[@\]\}", piece.text) if piece.quote != "'" else None
    return variables.get(found[1]) if found else None


def _count(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 10**15:
        return int(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_count(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        value = _ARITHMETIC[type(node.op)](_count(node.left), _count(node.right))
        if abs(value) < 10**15:
            return value
    raise ValueError


def _judge(words: list[str]) -> bool | None:
    """What a test comes to, None if it is none or asks for more than the script says."""
    if not words or words[0] not in _TESTS:
        return None
    inner = [word for word in words[1:] if word not in ("]", "]]")]
    if inner[:1] == ["!"]:
        value = _judge(["[", *inner[1:]])
        return None if value is None else not value
    if any("$" in word or "`" in word for word in inner):
        return None
    if len(inner) in (1, 2) and inner[0] in ("-n", "-z"):
        return bool(inner[1:] and inner[1]) == (inner[0] == "-n")
    if len(inner) == 1:
        return bool(inner[0])
    if len(inner) != 3:
        return None
    left, sign, right = inner
    if sign in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (sign != "!=")
    try:
        return _COMPARED[sign](int(left), int(right)) if sign in _COMPARED else None
    except ValueError:
        return None
