"""Shell text as words and operators, each with its line: what bash makes of quotes, comments and continuations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_OPERATORS = (";;", "&&", "||", ";", "&", "|", "(", ")")
_HEREDOC = re.compile(r"<<-?\s*(['\"\\]?)(\w+)\1")
_REDIRECT = re.compile(r"&?[<>]+[&|]?\s*")
_CLOSING = {"(": ")", "{": "}"}
#: Longest expression of `((`.
_LONGEST = 1_000
#: Operators that are words between `[[` and `]]`.
_TESTING = ("&&", "||", "(", ")", "<", ">", "|")
#: Words behind which another command begins.
_OPENING = ("if", "elif", "while", "until", "for", "then", "do", "else", "{", "!")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a word.

    Attributes:
        text: as written, without its quotes.
        quote: "" outside quotes, else the quote's character. Nothing is substituted within single quotes; what is
            substituted outside quotes is split into words.
    """

    text: str
    quote: str = ""


@dataclass(slots=True)
class Raw:
    """A word before substitution, at its line."""

    line: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def plain(self) -> str:
        """The word where none of it is quoted, else ""."""
        return "".join(piece.text for piece in self.pieces) if all(not piece.quote for piece in self.pieces) else ""


@dataclass(frozen=True, slots=True)
class Operator:
    """What stands between words, "\\n" at the end of a line.

    Attributes:
        glued: whether no space is between it and the word in front.
    """

    text: str
    glued: bool = False


Token = Raw | Operator


def tokens(text: str) -> list[Token]:
    """The words and operators of a script. `((`, an expression and `))` are three words where arithmetic is a command,
    and all between `[[` and `]]` is words."""
    return list(_Lexer(text).tokens())


def closing(text: str, start: int) -> int:
    """Where the `$(`, `${` or backtick at `start` ends: behind what closes it, or the end of the text."""
    if text[start] == "`":
        end = text.find("`", start + 1)
        return len(text) if end < 0 else end + 1
    opening = text[start + 1]
    depth, at = 0, start + 1
    while at < len(text):
        depth += (text[at] == opening) - (text[at] == _CLOSING[opening])
        at += 1
        if not depth:
            break
    return at


class _Lexer:
    """Reads a text from its start to its end."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text.replace("\r\n", "\n"), 0, 1
        self.word: Raw | None = None
        self.heredocs: list[str] = []
        self.skips = False
        #: Whether `[[` is open, and whether a command may begin here.
        self.tests, self.opens = False, True

    def tokens(self) -> Iterator[Token]:
        """Words and operators."""
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\n" or (letter == "\\" and self.text[self.at + 1:self.at + 2] == "\n"):
                yield from self._space(letter)
            elif letter == "#" and self.word is None:
                while self.at < len(self.text) and self.text[self.at] != "\n":
                    self.at += 1
            elif self.tests and (sign := self._starts(_TESTING)):
                yield from self._done()
                yield Raw(self.line, [Piece(sign)])
                self._move(len(sign))
            elif self.opens and self.word is None and (end := self._arithmetic()):
                yield Raw(self.line, [Piece("((")])
                yield Raw(self.line, [Piece(self.text[self.at + 2:end], '"')])
                yield Raw(self.line, [Piece("))")])
                self._move(end + 2 - self.at)
                self.opens = False
            elif letter in "<>&" and self._redirect():
                continue
            elif operator := self._starts(_OPERATORS):
                glued = self.word is not None
                yield from self._done()
                self._move(len(operator))
                self.tests, self.opens = False, True
                yield Operator(operator, glued)
            else:
                self._part(letter)
        yield from self._done()

    def _starts(self, signs: tuple[str, ...]) -> str | None:
        return next((one for one in signs if self.text.startswith(one, self.at)), None)

    def _space(self, letter: str) -> Iterator[Token]:
        """A space, the end of a line, or a line that goes on."""
        yield from self._done()
        if letter == "\\":
            self._move(1)
        self._move(1)
        if letter == "\n":
            self._skip_heredocs()
            self.tests, self.opens = False, True
            yield Operator("\n")

    def _arithmetic(self) -> int:
        """Where the `((` that stands here ends, 0 if none does or it has no end on its line."""
        if not self.text.startswith("((", self.at):
            return 0
        line = self.text.find("\n", self.at, self.at + _LONGEST)
        end = self.text.find("))", self.at, line if line >= 0 else self.at + _LONGEST)
        while end >= 0 and self.text[end + 2:end + 3] == ")":
            end += 1
        return max(0, end)

    def _done(self) -> Iterator[Raw]:
        """The word that ends here; the target of a redirection is dropped."""
        word, self.word = self.word, None
        if word is None:
            return
        if not self.skips:
            self.tests = word.plain == "[[" or (self.tests and word.plain != "]]")
            self.opens = word.plain in _OPENING
            yield word
        self.skips = False

    def _redirect(self) -> bool:
        """Whether a redirection stands here; it is skipped, with the number in front of it."""
        if found := _HEREDOC.match(self.text, self.at):
            self.heredocs.append(found[2])
            self._move(len(found[0]))
            return True
        found = _REDIRECT.match(self.text, self.at)
        if not found:
            return False
        if self.word is not None and self.word.plain.isdigit():
            self.word = None
        self._move(len(found[0]))
        self.skips = True
        return True

    def _skip_heredocs(self) -> None:
        for end in self.heredocs:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                line = self.text[self.at:stop if stop >= 0 else len(self.text)]
                self._move(len(line) + 1)
                if line.strip() == end:
                    break
        self.heredocs.clear()

    def _part(self, letter: str) -> None:
        """One more part of the word."""
        if self.word is None:
            self.word = Raw(self.line)
        if letter in "'\"":
            self._quoted(letter)
        elif letter == "\\":
            self.word.pieces.append(Piece(self.text[self.at + 1:self.at + 2], "'"))
            self._move(2)
        elif letter == "`" or (letter == "$" and self.text[self.at + 1:self.at + 2] in _CLOSING):
            end = closing(self.text, self.at)
            self.word.pieces.append(Piece(self.text[self.at:end]))
            self._move(end - self.at)
        else:
            self.word.pieces.append(Piece(letter))
            self._move(1)

    def _quoted(self, quote: str) -> None:
        """From one quote to the next."""
        assert self.word is not None
        end, start = self.at + 1, self.at + 1
        text: list[str] = []
        while end < len(self.text) and self.text[end] != quote:
            if quote == '"' and self.text[end] == "\\" and self.text[end + 1:end + 2] in '$"\\`\n':
                # a continued line stays a line, so that what follows keeps its number
                text += self.text[start:end], self.text[end + 1:end + 2]
                end = start = end + 2
            elif quote == '"' and (self.text[end] == "`" or self.text[end:end + 2] in ("${", "$(")):
                end = closing(self.text, end)
            else:
                end += 1
        text.append(self.text[start:end])
        self.word.pieces.append(Piece("".join(text), quote))
        self._move(end + 1 - self.at)

    def _move(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count
