"""A shell script as a tree of commands: lists, branches, loops and functions, as far as a launch script has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sim.imports.script.lexer import Operator, Raw, Token, tokens

#: Deepest nesting of commands that is followed.
_DEEPEST = 60
_SEPARATORS = ("\n", ";", "&")
_JOINS = ("&&", "||", "|")
_NAME = re.compile(r"[A-Za-z_][\w.:-]*\Z")
_ARRAY = re.compile(r"\w+\+?=\Z")


class TooDeepError(ValueError):
    """Commands within commands without end."""


@dataclass(slots=True)
class Simple:
    """A simple command.

    Attributes:
        arrays: for each word `NAME=` that an array follows, its position and the array's words.
    """

    words: list[Raw] = field(default_factory=list)
    arrays: dict[int, list[Raw]] = field(default_factory=dict)


@dataclass(slots=True)
class If:
    """`if`: conditions with what is run where they hold, and what is run where none does."""

    line: int
    branches: list[tuple[Body, Body]] = field(default_factory=list)
    otherwise: Body = field(default_factory=list)


@dataclass(slots=True)
class Case:
    """`case`: patterns with what is run for the first that fits."""

    line: int
    subject: Raw | None = None
    clauses: list[tuple[list[Raw], Body]] = field(default_factory=list)


@dataclass(slots=True)
class For:
    """`for`: what stands between the word and `do`, and what is run each round."""

    line: int
    head: list[Raw]
    body: Body = field(default_factory=list)


@dataclass(slots=True)
class While:
    """`while` and `until`."""

    line: int
    until: bool
    condition: Body
    body: Body = field(default_factory=list)


@dataclass(slots=True)
class Function:
    """A function's definition."""

    name: str
    body: Body


@dataclass(slots=True)
class Group:
    """Commands in braces or parentheses."""

    body: Body


Node = Simple | If | Case | For | While | Function | Group


@dataclass(slots=True)
class Item:
    """A command of a list.

    Attributes:
        join: the operator in front of it, "" if none ties it to the command before.
        negated: whether `!` stands in front.
    """

    node: Node
    join: str = ""
    negated: bool = False


Body = list[Item]


def parse(text: str) -> Body:
    """The commands of a script, in order. Raises TooDeepError."""
    parser = _Parser(tokens(text))
    body: Body = []
    while not parser.over:
        body += parser.body(())
        parser.skip()  # a closing word that nothing opened
    return body


def every(body: Body) -> Iterator[Node]:
    """All commands of a body and of the bodies in it, those of conditions and of functions included."""
    for item in body:
        yield item.node
        for inner in _bodies(item.node):
            yield from every(inner)


def _bodies(node: Node) -> list[Body]:
    if isinstance(node, If):
        return [one for branch in node.branches for one in branch] + [node.otherwise]
    if isinstance(node, Case):
        return [body for _, body in node.clauses]
    if isinstance(node, While):
        return [node.condition, node.body]
    return [] if isinstance(node, Simple) else [node.body]


class _Parser:
    """Reads commands off a list of tokens; what is no shell is read as far as it goes."""

    def __init__(self, found: list[Token]) -> None:
        self.tokens, self.at, self.depth = found, 0, 0

    @property
    def over(self) -> bool:
        return self.at >= len(self.tokens)

    def skip(self) -> None:
        """Goes over a token."""
        self.at += 1

    def body(self, stops: tuple[str, ...]) -> Body:
        """Commands up to one of these words or operators, which is left where it stands."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise TooDeepError
        body: Body = []
        join, negated = "", False
        while not self.over:
            token = self.tokens[self.at]
            if isinstance(token, Operator):
                if token.text in stops or token.text in (")", ";;"):
                    break
                if token.text == "(":
                    self.skip()
                    body.append(Item(Group(self._until(")")), join, negated))
                    join, negated = "", False
                    continue
                self.skip()
                if token.text in _JOINS and body:
                    join = token.text
                elif token.text != "\n":
                    join = ""
                continue
            if token.plain in stops or token.plain in ("fi", "done", "esac", "}"):
                break
            if token.plain in ("!", "time"):
                negated = negated != (token.plain == "!")
                self.skip()
                continue
            body.append(Item(self._command(token), join, negated))
            join, negated = "", False
        self.depth -= 1
        return body

    def _until(self, *stops: str) -> Body:
        """A body and the word that ends it."""
        body = self.body(stops)
        if self._is(*stops):
            self.skip()
        return body

    def _is(self, *texts: str) -> bool:
        if self.over:
            return False
        token = self.tokens[self.at]
        return (token.text if isinstance(token, Operator) else token.plain) in texts

    def _command(self, first: Raw) -> Node:
        """A command that begins here with a word."""
        name = first.plain
        readers: dict[str, Callable[[Raw], Node]] = {
            "if": self._if, "case": self._case, "for": self._for, "select": self._for, "while": self._while,
            "until": self._while}
        if name in readers:
            self.skip()
            return readers[name](first)
        if name == "{":
            self.skip()
            return Group(self._until("}"))
        if name == "function" and isinstance(after := self._peek(1), Raw):
            self.at += 2
            if self._is("("):
                self.at += 2
            return self._function(after.plain)
        opening, closing = self._peek(1), self._peek(2)
        if (_NAME.match(name) and isinstance(opening, Operator) and opening.text == "("
                and isinstance(closing, Operator) and closing.text == ")"):
            self.at += 3
            return self._function(name)
        return self._simple()

    def _peek(self, ahead: int) -> Token | None:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else None

    def _function(self, name: str) -> Function:
        while self._is("\n"):
            self.skip()
        if self._is("{", "("):
            ends = "}" if self._is("{") else ")"
            self.skip()
            return Function(name, self._until(ends))
        return Function(name, [])

    def _simple(self) -> Simple:
        command = Simple()
        while not self.over:
            token = self.tokens[self.at]
            if isinstance(token, Raw):
                command.words.append(token)
                self.skip()
            elif (token.text == "(" and token.glued and command.words and _ARRAY.match(command.words[-1].plain)):
                self.skip()
                command.arrays[len(command.words) - 1] = self._array()
            else:
                break
        return command

    def _array(self) -> list[Raw]:
        """Words up to the closing parenthesis."""
        words: list[Raw] = []
        while not self.over and not self._is(")"):
            token = self.tokens[self.at]
            if isinstance(token, Raw):
                words.append(token)
            self.skip()
        self.skip()
        return words

    def _if(self, first: Raw) -> If:
        found = If(first.line)
        while True:
            condition = self._until("then")
            found.branches.append((condition, self.body(("elif", "else", "fi"))))
            if not self._is("elif"):
                break
            self.skip()
        if self._is("else"):
            self.skip()
            found.otherwise = self.body(("fi",))
        if self._is("fi"):
            self.skip()
        return found

    def _case(self, first: Raw) -> Case:
        found = Case(first.line)
        if isinstance(subject := self._peek(0), Raw):
            found.subject = subject
            self.skip()
        while self._is("\n", "in"):
            self.skip()
        while not self.over and not self._is("esac"):
            patterns: list[Raw] = []
            while not self.over and not self._is(")", "esac"):
                token = self.tokens[self.at]
                if isinstance(token, Raw):
                    patterns.append(token)
                self.skip()
            if self._is("esac"):
                break
            self.skip()
            found.clauses.append((patterns, self.body(("esac", ";;"))))
            if self._is("fi", "done", "}", ")", ";;"):
                self.skip()
        if self._is("esac"):
            self.skip()
        return found

    def _for(self, first: Raw) -> For:
        head: list[Raw] = []
        while not self.over and not self._is("do", "{"):
            token = self.tokens[self.at]
            if isinstance(token, Raw):
                head.append(token)
            elif token.text not in (";", "\n"):
                break
            self.skip()
        return For(first.line, head, self._round())

    def _while(self, first: Raw) -> While:
        condition = self.body(("do",))
        return While(first.line, first.plain == "until", condition, self._round())

    def _round(self) -> Body:
        """What is run each round."""
        if not self._is("do", "{"):
            return []
        ends = "done" if self._is("do") else "}"
        self.skip()
        return self._until(ends)
