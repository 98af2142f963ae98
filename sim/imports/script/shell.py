"""What a launch script starts, without running it.

Variables, arrays, defaults (`${NAME:-8}`), whole-number arithmetic, branches, loops and functions are followed as bash
does in an empty environment. What only a running shell knows (commands, files, the environment) stays as it is written,
`$NAME`; a condition that asks for it counts as failed, and is told where something hangs on it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sim.errors import Fault, UserError
from sim.imports.allocator import VARIABLES
from sim.imports.script.conditions import TESTS, UNKNOWN, Verdict, judge
from sim.imports.script.grammar import (
    Body,
    Case,
    For,
    Function,
    Group,
    If,
    Node,
    Simple,
    TooDeepError,
    While,
    every,
    parse,
)
from sim.imports.script.lexer import Piece, Raw
from sim.imports.script.variables import Variables, Word
from sim.imports.script.written import clipped, list_written, written

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ARGUMENT = re.compile(r"(^|\s)--[A-Za-z]")
_RANGE = re.compile(r"\{(\d{1,4})\.\.(\d{1,4})\}\Z")
_DECLARES = ("export", "declare", "local", "readonly", "typeset", "eval", "set", "exec", "builtin")
#: Commands that answer a question, so that whether they succeed is not known here.
_ASKS = ("grep", "egrep", "which", "command", "type", "hash", "cmp", "diff", "pgrep", "read")
#: Commands with arguments of their own, which no training reads.
_ASIDE = ("echo", "printf", "mkdir", "pip", "pip3", "apt", "apt-get", "wget", "curl", "git", "rm", "cp", "mv", "ls",
          "cat", "tar", "conda", "module", "huggingface-cli", "rsync", "sed", "awk", "chmod", "ln", "sleep", "exit")
#: Variables that matter though no argument holds them.
TELLING = ("CUDA_DEVICE_MAX_CONNECTIONS", *VARIABLES, "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS",
           "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE",
           "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "CUDA_LAUNCH_BLOCKING", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
#: Rounds of a loop, commands and calls within calls: more is no launch script.
_ROUNDS, _MOST, _DEEPEST = 100, 20_000, 30


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that the script leaves open: where, and what was taken."""

    name: str
    line: int
    why: str


@dataclass(frozen=True, slots=True)
class Launch:
    """The words of a command that is run.

    Attributes:
        again: whether a loop runs it a second time or later.
        loops: what the loops around it leave open.
    """

    words: list[Word]
    again: bool = False
    loops: tuple[Remark, ...] = ()


class _LeaveError(Exception):
    """`break`, `continue` and `return`, up to where they lead."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass
class Script:
    """A script as far as it can be followed.

    Attributes:
        file: as the user named it.
        variables: at the end of it.
        ran: every command that is run.
    """

    file: str
    variables: Variables = field(init=False)
    ran: list[Launch] = field(default_factory=list)
    _functions: dict[str, Body] = field(default_factory=dict)
    _bodies: dict[str, Body] = field(default_factory=dict)
    _called: set[str] = field(default_factory=set)
    _known: dict[int, bool] = field(default_factory=dict)
    _remarks: dict[Remark, None] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)
    _loops: list[tuple[int, Remark]] = field(default_factory=list)
    _text: str = ""
    _tree: Body = field(default_factory=list)
    _steps: int = 0

    def __post_init__(self) -> None:
        self.variables = Variables(self.file)

    @property
    def remarks(self) -> list[Remark]:
        """Conditions that nobody can decide here, in the order they were met."""
        return list(self._remarks)

    @property
    def uncalled(self) -> list[str]:
        """Functions with arguments in them that nothing calls."""
        return [name for name, body in self._bodies.items() if name not in self._called and self._matters(body)]

    def follow(self, text: str) -> None:
        """All of a script's commands. Raises UserError."""
        self._text = text
        try:
            self._tree = parse(text)
            self._bodies = {node.name: node.body for node in every(self._tree) if isinstance(node, Function)}
            self._list(self._tree)
        except _LeaveError:
            pass
        except (TooDeepError, RecursionError):
            raise self._fault("its commands are nested too deep for a launch script") from None

    def _fault(self, message: str) -> UserError:
        return UserError(Fault(message, "", self.file))

    def _list(self, body: Body, asked: bool = False) -> Verdict:
        """Commands one after the other; what they come to together where they are a condition (`asked`)."""
        status, start, told = Verdict(True), 0, False
        for position, item in enumerate(body):
            if item.join not in ("&&", "||"):
                status, start, told = self._item(item.node, item.negated, asked), position, False
                continue
            runs = bool(status.value) == (item.join == "&&")
            tests = isinstance(item.node, Simple) and _is_test(item.node)
            if status.why and not asked and not told and self._matters([item]):
                self._remark("", body[start:position], status)
                told = True
            if runs or (asked and tests):
                found = self._item(item.node, item.negated, asked)
            elif asked:
                found = UNKNOWN
            else:
                continue
            status = status.both(found) if item.join == "&&" else status.either(found)
        return status

    def _item(self, node: Node, negated: bool, asked: bool) -> Verdict:
        self._steps += 1
        if self._steps > _MOST:
            raise self._fault("it runs too many commands for a launch script")
        found = Verdict(True)
        if isinstance(node, Simple):
            found = self._simple(node, asked)
        elif isinstance(node, Group):
            found = self._list(node.body, asked)
        elif isinstance(node, If):
            self._if(node)
        elif isinstance(node, Case):
            self._case(node)
        elif isinstance(node, For):
            self._for(node)
        elif isinstance(node, While):
            self._while(node)
        else:
            self._functions[node.name] = node.body
        return found.negated() if negated else found

    def _if(self, node: If) -> None:
        bodies = [body for _, body in node.branches] + [node.otherwise]
        matters = any(self._matters(body) for body in bodies)
        for condition, body in node.branches:
            verdict = self._list(condition, asked=True)
            if verdict.why and matters:
                self._remark("if", condition, verdict)
            if verdict.value:
                self._list(body)
                return
        self._list(node.otherwise)

    def _case(self, node: Case) -> None:
        operands = self.variables.operands([node.subject] if node.subject is not None else [])
        text = operands[0].text if operands and not operands[0].unknown else ""
        open_ = [one for one in operands if one.missing or one.unknown]
        if open_ and any(self._matters(body) for _, body in node.clauses):
            why = f"{open_[0].missing} has no value here" if open_[0].missing else "not known here"
            self._add(Remark(clipped(f"case {written(node.subject)}"), node.line, f"{why}: taken as empty"))
        for patterns, body in node.clauses:
            known = [word.text for raw in patterns for word in self.variables.expand(raw, empty=True)]
            if any(fnmatch.fnmatchcase(text, one) for one in known):
                self._list(body)
                return

    def _for(self, node: For) -> None:
        """Every round, as far as words are known. What a loop starts is taken as of its first round."""
        head = node.head
        if head and head[0].plain == "((":
            self._counted(node)
            return
        if not head:
            return
        words = [one for raw in (head[2:] if len(head) > 1 else ()) for one in _ranged(self.variables.expand(raw))]
        if len(head) == 1:
            words = self.variables.arguments[-1] if self.variables.arguments else []
        name = clipped(" ".join(["for", *(written(raw) for raw in head)]))
        for number, word in enumerate(words[:_ROUNDS]):
            self.variables.values[head[0].plain] = [word]
            remark = Remark(name, node.line, f"the first of {len(words)} rounds is taken")
            if not self._round(node.body, remark, number):
                break

    def _counted(self, node: For) -> None:
        """`for ((i = 0; i < 3; i++))`."""
        parts = [*"".join(piece.text for piece in node.head[1].pieces).split(";"), "", ""]
        name = clipped(f"for (({';'.join(parts[:3])}))")
        self.variables.arithmetic(parts[0])
        for number in range(_ROUNDS):
            if parts[1].strip() and not self.variables.arithmetic(parts[1]):
                break
            if not self._round(node.body, Remark(name, node.line, "the first round is taken"), number):
                break
            self.variables.arithmetic(parts[2])

    def _while(self, node: While) -> None:
        word = "until" if node.until else "while"
        for number in range(_ROUNDS):
            verdict = self._list(node.condition, asked=True)
            verdict = verdict.negated() if node.until else verdict
            if verdict.why and not number and self._matters(node.body):
                self._remark(word, node.condition, verdict)
            if not verdict.value:
                break
            if not self._round(node.body, Remark(word, node.line, "the first round is taken"), number):
                break

    def _round(self, body: Body, remark: Remark, number: int) -> bool:
        """One round of a loop; whether another may follow."""
        self._loops.append((number, remark))
        try:
            self._list(body)
        except _LeaveError as leave:
            if leave.name == "return":
                raise
            return leave.name == "continue"
        finally:
            self._loops.pop()
        return True

    def _simple(self, command: Simple, asked: bool) -> Verdict:
        """One command: its assignments take hold, its words are kept."""
        if _is_test(command):
            return judge(self.variables.operands(command.words))
        if command.words[0].plain == "((":
            return self._arithmetic("".join(piece.text for raw in command.words[1:2] for piece in raw.pieces))
        words: list[Word] = []
        own = command.words[0].plain == "local"
        for position, raw in enumerate(command.words):
            if not words and (raw.plain in _DECLARES or (position and re.match(r"-[a-zA-Z]+\Z", raw.plain))):
                continue
            found = _ASSIGNED.match("".join(piece.text for piece in raw.pieces)) if not words else None
            if found and raw.pieces and not any(piece.quote for piece in raw.pieces[:len(found[0])]):
                if own:
                    self.variables.keep(found[1])
                self.variables.assign(found[1], bool(found[2]), raw, len(found[0]), command.arrays.get(position))
            elif own:
                self.variables.keep(raw.plain)
            elif raw.pieces or words:
                inner = position and command.words[position - 1].plain == "-c"
                words += self.variables.expand(_opened(raw) if inner else raw)
        return self._run(words, asked) if words else Verdict(True)

    def _arithmetic(self, text: str) -> Verdict:
        self.variables.missing = ""
        value = self.variables.arithmetic(text)
        missing = self.variables.missing
        return UNKNOWN if value is None else Verdict(bool(value), f"{missing} has no value here" if missing else "")

    def _run(self, words: list[Word], asked: bool) -> Verdict:
        """A command of these words."""
        name, rest = words[0].text, words[1:]
        if name in ("break", "continue", "return"):
            if self._loops if name != "return" else self.variables.arguments:
                raise _LeaveError(name)
        elif name == "shift":
            if self.variables.arguments:
                times = int(rest[0].text) if rest and rest[0].text.isdigit() else 1
                del self.variables.arguments[-1][:times]
        elif name == "unset":
            for word in rest:
                self.variables.values.pop(word.text, None)
        elif name == "let":
            for word in rest:
                self.variables.arithmetic(word.text)
        elif name == "getopts":
            return UNKNOWN if self.variables.arguments and self.variables.arguments[-1] else Verdict(False)
        elif name in (":", "true", "false"):
            return Verdict(name != "false")
        elif name in self._functions:
            self._call(name, rest)
        else:
            self.ran.append(Launch(words, any(number for number, _ in self._loops),
                                   tuple(remark for _, remark in self._loops)))
            return UNKNOWN if asked or name in _ASKS else Verdict(True)
        return Verdict(True)

    def _call(self, name: str, arguments: list[Word]) -> None:
        if len(self.variables.arguments) >= _DEEPEST:
            raise self._fault(f"its function {name} calls itself without end")
        self._called.add(name)
        self.variables.call(list(arguments))
        try:
            self._list(self._functions[name])
        except _LeaveError as leave:
            if leave.name != "return":
                raise
        finally:
            self.variables.end()

    def _matters(self, body: Body) -> bool:
        """Whether commands have arguments, or set variables that the script uses."""
        return any(self._telling(node) for node in every(body) if isinstance(node, Simple) and node.words)

    def _telling(self, node: Simple) -> bool:
        known = self._known.get(id(node))
        if known is not None:
            return known
        self._known[id(node)] = False  # until it is known: a function may call itself
        name = node.words[0].plain
        texts = ["".join(piece.text for piece in raw.pieces) for raw in node.words]
        arrays = "".join(piece.text for words in node.arrays.values() for raw in words for piece in raw.pieces)
        found = not _is_test(node) and (
            any(one is not None and self._uses(one[1]) for one in map(_ASSIGNED.match, texts))
            or (name in self._bodies and self._matters(self._bodies[name]))
            or (name not in _ASIDE and any(_ARGUMENT.search(text) for text in (*texts, arrays))))
        self._known[id(node)] = found
        return found

    def _uses(self, name: str) -> bool:
        """Whether a variable matters: the script has its name elsewhere than in front of `=`."""
        if not self._used:
            self._used = {*TELLING, *re.findall(r"\b[A-Za-z_]\w*\b(?!\+?=)", self._text)}
        return name in self._used

    def _remark(self, word: str, condition: Body, verdict: Verdict) -> None:
        line = next((raw.line for node in every(condition) if isinstance(node, Simple) for raw in node.words), 0)
        text = f"{word} {list_written(condition)}".strip()
        self._add(Remark(text, line, f"{verdict.why}: taken as {'true' if verdict.value else 'false'}"))

    def _add(self, remark: Remark) -> None:
        self._remarks[remark] = None


def _is_test(command: Simple) -> bool:
    return bool(command.words) and command.words[0].plain in TESTS


def _opened(raw: Raw) -> Raw:
    """A command for `bash -c` in single quotes, in which the inner shell puts in what variables hold."""
    return Raw(raw.line, [Piece(piece.text, '"') if piece.quote == "'" and " " in piece.text else piece
                          for piece in raw.pieces])


def _ranged(words: Iterable[Word]) -> Iterator[Word]:
    """Words, `{0..7}` as those it stands for."""
    for word in words:
        found = _RANGE.match(word.text)
        if found:
            yield from (Word(str(number), word.line) for number in range(int(found[1]), int(found[2]) + 1)[:_ROUNDS])
        else:
            yield word
