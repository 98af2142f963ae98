"""A script's variables, and what words become of them: substitution as far as the script itself gives values.

What only a running shell knows stays in the word without a space in it (`$NAME`, `$(scontrol...)`), so that it is never
taken for several words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from sim.errors import Fault, UserError
from sim.imports.script.conditions import Operand, whole
from sim.imports.script.lexer import Piece, Raw, closing

#: Longest word, and all of a script's words together, in characters: more is no launch script.
_LONGEST, _MOST = 100_000, 5_000_000
#: Substitutions within substitutions.
_DEEPEST = 20
_PLAIN = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?!$-])")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#])(\[[@*]\])?(?:(:?[-=+])(.*))?\Z", re.DOTALL)
_ASSIGNS = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)\Z", re.DOTALL)
_STEPS = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*(\+\+|--)|(\+\+|--)\s*([A-Za-z_]\w*))\s*\Z")


@dataclass(frozen=True, slots=True)
class Word:
    """A word after substitution, at its line."""

    text: str
    line: int

    def split(self) -> Iterator[Word]:
        """The words within it."""
        for found in re.finditer(r"\S+", self.text):
            yield Word(found[0], self.line + self.text.count("\n", 0, found.start()))


def unresolved(text: str) -> bool:
    """Whether a word begins with what only a running shell knows."""
    return text.startswith(("$", "`"))


@dataclass(frozen=True, slots=True)
class _Part:
    """Something to substitute: where it stands, and the one of these that it is."""

    start: int
    end: int
    name: str = ""
    braced: str = ""
    arithmetic: str = ""


@dataclass
class Variables:
    """Variables by name, and the arguments of the function that is run.

    Attributes:
        file: of the script.
        values: name -> words; an array has several, anything else one.
        arguments: of each function that is run, the innermost last; `saved` are the values its `local` names had.
        missing: the first variable without a value that was met, "" if none; whoever asks clears it.
        unknown: whether anything was met that only a running shell knows; likewise.
    """

    file: str
    values: dict[str, list[Word]] = field(default_factory=dict)
    arguments: list[list[Word]] = field(default_factory=list)
    saved: list[dict[str, list[Word] | None]] = field(default_factory=list)
    missing: str = ""
    unknown: bool = False
    _spent: int = 0
    _depth: int = 0

    def call(self, arguments: list[Word]) -> None:
        """A function begins."""
        self.arguments.append(arguments)
        self.saved.append({})

    def end(self) -> None:
        """The function that is run ends: names that were its own have their earlier values."""
        self.arguments.pop()
        for name, value in self.saved.pop().items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value

    def keep(self, name: str) -> None:
        """Makes a name the own of the function that is run."""
        if self.saved:
            self.saved[-1].setdefault(name, self.values.get(name))

    def assign(self, name: str, adds: bool, raw: Raw, skip: int, array: list[Raw] | None) -> None:
        """`NAME=value`, `NAME+=value` or `NAME=(words)`; the name takes `skip` letters. Raises UserError."""
        if array is not None:
            value = [word for one in array for word in self.expand(one)]
        else:
            value = [Word("".join(self.text(piece) for piece in _joined(raw.pieces[skip:])), raw.line)]
        if adds:
            earlier = self.values.get(name, [])
            plain = array is None and len(earlier) == 1
            value = [Word(earlier[0].text + value[0].text, earlier[0].line)] if plain else earlier + value
        self._spend(value, raw.line)
        self.values[name] = value

    def _spend(self, words: Iterable[Word], line: int) -> None:
        """Counts characters, so that variables that double themselves come to an end. Raises UserError."""
        size = sum(len(word.text) for word in words)
        self._spent += size
        if size > _LONGEST or self._spent > _MOST:
            raise UserError(Fault("its variables grow too long for a launch script", "", self.file, line))

    def operands(self, words: Iterable[Raw]) -> list[Operand]:
        """The words of a test. A variable without a value is empty, as bash has it in an empty environment."""
        found: list[Operand] = []
        for raw in words:
            self.missing, self.unknown = "", False
            for word in self.expand(raw, empty=True):
                unknown = self.unknown or "$" in word.text or "`" in word.text
                found.append(Operand(word.text, self.missing, unknown))
        return found

    def expand(self, raw: Raw, empty: bool = False) -> list[Word]:
        """The words that a word becomes.

        Args:
            empty: a variable without a value is empty, as in a test; else it stays as it is written.

        Raises:
            UserError: they grow too long.
        """
        done: list[Word] = []
        now: str | None = None
        line = raw.line  # of the word in the making
        for piece in _joined(raw.pieces):
            array = self._array(piece)
            if array is not None:
                if now:
                    done.append(Word(now, line))
                done, now = done + array, None
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

    def text(self, piece: Piece) -> str:
        """A piece as one text, split nowhere."""
        if self._depth > _DEEPEST:
            return piece.text
        self._depth += 1
        try:
            return "".join(text for text, _, _ in self._parts(replace(piece, quote=piece.quote or '"'), 0, False))
        finally:
            self._depth -= 1

    def _array(self, piece: Piece) -> list[Word] | None:
        """The words of an array that a piece names, each a word of its own; None if it names none."""
        if piece.quote != "'" and piece.text in ("$@", "${@}"):
            return self._value("@")
        found = re.fullmatch(r"\$\{(\w+)\[@\]\}", piece.text) if piece.quote != "'" else None
        return self.values.get(found[1]) if found else None

    def _parts(self, piece: Piece, line: int, empty: bool) -> Iterator[tuple[str, bool, int]]:
        """(text, whether it is split into words, line) of a piece."""
        if piece.quote == "'" or len(piece.text) > _LONGEST // 5:
            yield piece.text, False, line
            return
        last = 0
        for part in _found(piece.text):
            if part.start > last:
                yield piece.text[last:part.start], False, line
            last = part.end
            value = self._substituted(part)
            if value is None:
                self.unknown = self.unknown or not part.name
                self.missing = self.missing or part.name
                yield ("" if empty else _short(piece.text[part.start:part.end])), False, line
            elif piece.quote:
                yield " ".join(word.text for word in value), False, line
            else:
                for word in value:
                    yield word.text, True, word.line
        if last < len(piece.text) or not piece.text:
            yield piece.text[last:], False, line

    def _value(self, name: str) -> list[Word] | None:
        """A variable's words, None without a value."""
        arguments = self.arguments[-1] if self.arguments else []
        if name in ("@", "*"):
            return arguments
        if name == "#":
            return [Word(str(len(arguments)), 0)]
        if name.isdigit() and self.arguments:
            return arguments[int(name) - 1:int(name)] if int(name[:4]) else []
        return self.values.get(name)

    def _substituted(self, part: _Part) -> list[Word] | None:
        """The words behind a substitution, None if nobody knows them here."""
        if part.arithmetic:
            number = self.counted(part.arithmetic)
            return None if number is None else [Word(str(number), 0)]
        braced = _BRACED.match(part.braced) if part.braced else None
        if braced is None:
            return self._value(part.name) if part.name else None
        value = self._value(braced[2])
        if braced[1]:  # how many words or letters
            size = None if value is None else len(value) if braced[3] else sum(len(word.text) for word in value)
            return None if size is None or braced[4] else [Word(str(size), 0)]
        without = value is None or ((braced[4] or "")[:1] == ":" and not any(word.text for word in value))
        if not braced[4] or (not without and braced[4][-1] != "+"):
            return value
        if without and braced[4][-1] == "+":
            return []
        value = [Word(self.text(Piece(braced[5].strip("\"'"), '"')), 0)]
        if braced[4][-1] == "=":
            self.values[braced[2]] = value
        return value

    def counted(self, text: str, empty: bool = False) -> int | None:
        """The value of an arithmetic expression, None if it is not known here.

        Args:
            empty: a variable without a value counts as 0, as bash has it; `missing` says which.
        """
        plain = re.sub(r"\$([A-Za-z_]\w*)", r"\1", text) if empty else text
        plain = self.text(Piece(plain, '"'))
        plain = re.sub(r"[A-Za-z_]\w*", lambda name: self._number(name[0], empty), plain)
        try:
            return whole(plain)
        except ValueError:
            return None

    def _number(self, name: str, empty: bool) -> str:
        value = self.values.get(name)
        if value is not None:
            return "".join(word.text for word in value[:1]) or "0"
        self.missing = self.missing or name
        return "0" if empty else name

    def arithmetic(self, text: str) -> int | None:
        """What `(( text ))` comes to; its assignments take hold. None if it is not known here."""
        if found := _STEPS.match(text):
            name, sign = found[1] or found[4], found[2] or found[3]
            text = f"{name}={name}{sign[0]}1"
        found = _ASSIGNS.match(text)
        if not found:
            return self.counted(text, empty=True)
        value = self.counted(f"{found[1]}{found[2]}({found[3]})" if found[2] else found[3], empty=True)
        if value is not None:
            self.values[found[1]] = [Word(str(value), 0)]
        return value


def _found(text: str) -> Iterator[_Part]:
    """What there is to substitute in a text."""
    at = 0
    while at < len(text):
        if text[at] not in "$`":
            at += 1
            continue
        end, part = at + 1, None
        if text[at] == "`" or text[at:at + 2] in ("$(", "${"):
            end = closing(text, at)
            inner = text[at + 2:end - 1]
            if text.startswith("$((", at) and inner.endswith(")"):
                part = _Part(at, end, arithmetic=inner[1:-1])
            elif text.startswith("${", at):
                named = _BRACED.match(inner)
                part = _Part(at, end, named[2] if named else "", inner)
            else:
                part = _Part(at, end)
        elif found := _PLAIN.match(text, at):
            end, part = found.end(), _Part(at, found.end(), found[1])
        if part is not None:
            yield part
        at = end


def _short(text: str) -> str:
    """What is not known, as one word: of a command its first word."""
    if text.startswith(("`", "$(")) and not text.startswith("$(("):
        first, *more = text.split(None, 1)
        return f"{first}...{text[-1]}" if more else text
    return re.sub(r"\s+", "", text)


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
