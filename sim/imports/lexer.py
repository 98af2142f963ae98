"""Shell text as words and operators, each with its line: what bash makes of quotes, comments and continuations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_OPERATORS = (";;", "&&", "||", ";", "&", "|", "(", ")")
_HEREDOC = re.compile(r"<<-?\s*(['\"\\]?)(\w+)\1")
_REDIRECT = re.compile(r"&?[<>]+[&|]?\s*")
_CLOSING = {"(": ")", "{": "}"}


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


@dataclass(slots=True)
class Simple:
    """A simple command: its words, and the operator behind it ("\\n" at the end of a line).

    Attributes:
        arrays: for each word `NAME=` that an array follows, its position and the array's words.
    """

    words: list[Raw] = field(default_factory=list)
    end: str = "\n"
    arrays: dict[int, list[Raw]] = field(default_factory=dict)


def commands(text: str) -> Iterator[Simple]:
    """The simple commands of a script, in order."""
    lexer = _Lexer(text)
    now, inside = Simple(), False
    for token in lexer.tokens():
        if inside:
            if token == ")":
                inside = False
            elif isinstance(token, Raw):
                now.arrays[len(now.words) - 1].append(token)
        elif isinstance(token, Raw):
            now.words.append(token)
        elif token == "(" and now.words and lexer.glued and re.fullmatch(r"\w+\+?=", now.words[-1].plain):
            now.arrays[len(now.words) - 1] = []
            inside = True
        else:
            now.end = token
            yield now
            now = Simple()
    yield now


class _Lexer:
    """Reads a text from its start to its end."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text.replace("\r\n", "\n"), 0, 1
        self.word: Raw | None = None
        self.heredocs: list[str] = []
        #: Whether the last operator follows a word without space between them.
        self.glued = False
        self.skips = False

    def tokens(self) -> Iterator[Raw | str]:
        """Words and operators."""
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\n" or (letter == "\\" and self.text[self.at + 1:self.at + 2] == "\n"):
                yield from self._done()
                if letter == "\\":
                    self._move(1)
                self._move(1)
                if letter == "\n":
                    self._skip_heredocs()
                    yield "\n"
            elif letter == "#" and self.word is None:
                while self.at < len(self.text) and self.text[self.at] != "\n":
                    self.at += 1
            elif letter in "<>&" and self._redirect():
                continue
            elif operator := next((one for one in _OPERATORS if self.text.startswith(one, self.at)), None):
                self.glued = self.word is not None
                yield from self._done()
                self._move(len(operator))
                yield operator
            else:
                self._part(letter)
        yield from self._done()

    def _done(self) -> Iterator[Raw]:
        """The word that ends here; the target of a redirection is dropped."""
        if self.word is not None and not self.skips:
            yield self.word
        if self.word is not None:
            self.skips = False
        self.word = None

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
            end = self._substitution(self.at)
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
                end = self._substitution(end)
            else:
                end += 1
        text.append(self.text[start:end])
        self.word.pieces.append(Piece("".join(text), quote))
        self._move(end + 1 - self.at)

    def _substitution(self, start: int) -> int:
        """Where `$(`, `${` or a backtick at `start` ends."""
        if self.text[start] == "`":
            end = self.text.find("`", start + 1)
            return len(self.text) if end < 0 else end + 1
        opening = self.text[start + 1]
        closing, depth, at = _CLOSING[opening], 0, start + 1
        while at < len(self.text):
            depth += (self.text[at] == opening) - (self.text[at] == closing)
            at += 1
            if not depth:
                break
        return at

    def _move(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count
