# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Lists the texts of all errors and warnings of the sources: `python tools/messages.py`.

A text is the literals of one place, with `…` for each value between them. Errors of Deeptide's own making (broken
invariants) are left out: no user can act on them.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOLE = "…"


@dataclass(frozen=True)
class Message:
    """One place that throws."""

    path: Path
    line: int
    text: str  # empty: all of it comes from elsewhere

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


# --- C++ ---

# The calls that throw, and how many arguments precede the text.
_CHECKS = {"TORCH_CHECK": 1, "TORCH_CHECK_VALUE": 1, "TORCH_CHECK_INDEX": 1, "TORCH_CHECK_WITH": 2}
# Functions that take or make the text of an error, besides those that are [[noreturn]].
_MAKERS = {"explain", "bad", "blame", "problems.add", "problems_.add", "lines.push_back", "not_yet_text"}
_MAKERS |= {"TransportError"}
_FRAMED = {"malformed", "fail"}  # makers that others call
# Files whose functions return texts that others throw.
_TABLES = {"design/refusals.cc", "check/check_value.cc", "load/reader.cc", "bind/agreement.cc"}
_TABLES |= {"rules/rmsprop.cc"}
_OURS = {"std::logic_error", "NotPlain", "std::bad_alloc", "py::error_already_set"}

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|R"(?P<mark>[^\s()\\]{0,16})\((?P<raw>.*?)\)(?P=mark)"|"(?P<text>(?:\\.|[^"\\\n])*)"
    |'(?P<char>\\?[^'\n])'|(?P<word>[A-Za-z_][\w:]*(?:\.[A-Za-z_]\w*)*)|(?P<number>\d[\w.']*)|(?P<sign>[^\s\w])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(source: str) -> list[_Token]:
    source = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.)*", "", source, flags=re.MULTILINE | re.DOTALL)
    tokens, line, at = [], 1, 0
    for match in _TOKEN.finditer(source):
        line += source.count("\n", at, match.start())
        at = match.start()
        kind = "raw" if match["raw"] is not None else match.lastgroup or ""
        if kind == "comment":
            continue
        text = match[kind]
        if kind == "text":
            text = re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), text)
        tokens.append(_Token("text" if kind == "raw" else kind, text, line))
    return tokens


def _end(tokens: list[_Token], begin: int, closing: str) -> int:
    """The index of the `closing` sign outside of all brackets, in the expression that begins at `begin`."""
    depth = 0
    for at in range(begin, len(tokens)):
        sign = tokens[at].text if tokens[at].kind == "sign" else ""
        if depth == 0 and sign == closing:
            return at
        depth += (sign in "([{" and sign != "") - (sign in ")]}" and sign != "")
    return len(tokens)


def _skip_arguments(tokens: list[_Token], begin: int, end: int, count: int) -> int:
    for _ in range(count):
        begin = min(_end(tokens, begin, ","), end - 1) + 1
    return begin


def _text_of(tokens: list[_Token], joined: str = "+,()") -> str:
    """The literals, with a hole where anything but a sign of `joined` stands between them."""
    text, hole = "", False
    for token in tokens:
        if token.kind == "text":
            text += (HOLE if hole else "") + re.sub(r"\{[\w.:<>]*\}", HOLE, token.text)
            hole = False
        elif not (token.kind == "sign" and token.text in joined):
            hole = True
    return text + (HOLE if hole and text else "")


def _assigned(tokens: list[_Token], at: int, name: str) -> str:
    """The literals that the variable `name` got shortly before the token `at`, in its definition and after."""
    parts: list[str] = []
    for i in range(at - 1, max(1, at - 300), -1):
        if tokens[i].text != name or tokens[i].kind != "word" or tokens[i + 1].text not in ("=", "+", "{", "("):
            continue
        is_definition = tokens[i - 1].kind == "word" and tokens[i - 1].text not in ("return", "else")
        if not is_definition and tokens[i + 1].text not in ("=", "+"):
            continue
        parts.insert(0, _text_of(tokens[i + 1 : _end(tokens, i + 1, ";")]))
        if is_definition:
            break
    return HOLE.join(part for part in parts if part)


def _frame(tokens: list[_Token], at: int) -> str | None:
    """The text that the function defined at the token `at` puts around the one it is given; None: no definition."""
    if tokens[at + 1].text == "=" and tokens[at + 2].text == "[":  # a lambda
        at = _end(tokens, at + 2, "{")
    elif tokens[at + 1].text == "(" and not _is_call(tokens, at):
        at = _end(tokens, at + 2, ")") + 1
        while at < len(tokens) and tokens[at].text in ("const", "override"):
            at += 1
    else:
        return None
    if at >= len(tokens) or tokens[at].text != "{":
        return None
    body = tokens[at + 1 : _end(tokens, at + 1, "}")]
    for i, token in enumerate(body):
        if token.text in ("throw", "return"):
            return _text_of(body[i + 1 : _end(body, i + 1, ";")])
        if token.text in _CHECKS:
            end = _end(body, i + 2, ")")
            return _text_of(body[_skip_arguments(body, i + 2, end, _CHECKS[token.text]) : end])
        if token.text in _FRAMED:
            return _text_of(body[i + 2 : _end(body, i + 2, ")")])
    return ""


def _is_call(tokens: list[_Token], at: int) -> bool:
    """Not where a function is declared, nor where what it returns is thrown: that one is found by `throw`."""
    before = tokens[at - 1]
    return before.text in ("return", "else") or (before.kind == "sign" and before.text not in "&>*:")


@dataclass(frozen=True)
class _Source:
    path: Path
    tokens: list[_Token]
    frames: dict[str, str]


class _Cpp:
    def __init__(self, paths: list[Path]) -> None:
        texts = {path: path.read_text(encoding="utf-8") for path in paths}
        pattern = re.compile(r"\[\[noreturn\]\] (?:inline )?void ((?:fail|refuse|wrong|malformed|time_out|throw)\w*)\(")
        self.makers = _MAKERS | {name for text in texts.values() for name in pattern.findall(text)}
        self.sources = [self._read(path, text) for path, text in texts.items()]

    def _read(self, path: Path, text: str) -> _Source:
        tokens = _tokens(text)
        frames: dict[str, str] = {}
        for at, token in enumerate(tokens[:-2]):
            name = token.text.split("::")[-1]
            if token.kind == "word" and name in self.makers and (frame := _frame(tokens, at)):
                frames.setdefault(name, frame)
        return _Source(path, tokens, frames)

    def _frame_of(self, source: _Source, name: str) -> str:
        """The frame as defined in this file, or else in one of its layer."""
        if name in source.frames:
            return source.frames[name]
        layer = source.path.relative_to(ROOT).parts[:2]
        others = [o for o in self.sources if name in o.frames and o.path.relative_to(ROOT).parts[:2] == layer]
        others.sort(key=lambda other: other.path.suffix != ".h")
        return others[0].frames[name] if others else ""

    def _begin_and_end(self, tokens: list[_Token], at: int) -> tuple[int, int, str] | None:
        """The text of the error at the token `at`, and the function that completes it."""
        token, follower = tokens[at], tokens[at + 1]
        name = token.text.split("::")[-1]
        if token.text == "throw" and follower.kind == "word" and follower.text not in _OURS:
            maker = follower.text if follower.text in self.makers else ""
            return at + 2, _end(tokens, at + 1, ";"), maker
        if follower.text != "(":
            return None
        end = _end(tokens, at + 2, ")")
        if token.text == "log" and re.fullmatch(r"LogLevel::(warning|error)", tokens[at + 2].text):
            return at + 3, end, ""
        if token.text in _CHECKS:
            return _skip_arguments(tokens, at + 2, end, _CHECKS[token.text]), end, ""
        if name in self.makers and _is_call(tokens, at):
            return at + 2, end, name
        return None

    def messages(self) -> list[Message]:
        found = []
        for source in self.sources:
            tokens = source.tokens
            for at, token in enumerate(tokens[:-1]):
                place = self._begin_and_end(tokens, at) if token.kind == "word" else None
                if place is None:
                    continue
                begin, end, maker = place
                inner = zip(tokens[begin:end], tokens[begin + 1 : end + 1], strict=True)
                if any(one.text in self.makers and next_one.text == "(" for one, next_one in inner):
                    continue  # that one is found by itself
                text = _text_of(tokens[begin:end], "+()" if maker else "+,()")
                if not text and (names := [t.text for t in tokens[begin:end] if t.kind == "word"]):
                    text = _assigned(tokens, at, names[0])
                frame = self._frame_of(source, maker) if maker else ""
                if frame and text:
                    text = frame + " | " + text
                if text or not maker:
                    found.append(Message(source.path, token.line, text))
            if "/".join(source.path.parts[-2:]) in _TABLES:
                found += self._rows(source)
        return found

    @staticmethod
    def _rows(source: _Source) -> list[Message]:
        """The prose between semicolons and braces."""
        found, begin = [], 0
        for at, token in enumerate(source.tokens):
            if token.kind == "sign" and token.text in ";{}":
                text = _text_of(source.tokens[begin:at])
                if len(re.findall(r"[a-z]{2,} ", text)) >= 3 and not text.lstrip(HOLE).startswith(","):
                    found.append(Message(source.path, token.line, text))
                begin = at + 1
        return found


# --- Python ---


def _targets(node: ast.AST) -> list[str]:
    """The names that a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _python_text(node: ast.expr, function: ast.AST) -> str:
    """The literals of an expression; those of a variable are what the function assigns to it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return re.sub(r"%[srd]", HOLE, _python_text(node.left, function))
    if isinstance(node, ast.BinOp):
        return _python_text(node.left, function) + _python_text(node.right, function)
    if isinstance(node, ast.IfExp):
        return _python_text(node.body, function) + HOLE + _python_text(node.orelse, function)
    if isinstance(node, ast.Call):
        inner = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        return HOLE + HOLE.join(_python_text(part, function) for part in inner)
    if isinstance(node, ast.Name):
        assigned = [other.value for other in ast.walk(function) if node.id in _targets(other)]
        return HOLE + HOLE.join(_python_text(value, ast.Module([], [])) for value in assigned)
    return HOLE


# Functions of ours that raise what they are told.
_RAISERS = {"fail", "_fail", "_refuse", "refuse", "error", "exit", "warn", "warning"}


def _python_messages(path: Path) -> list[Message]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def function_of(node: ast.AST) -> ast.AST:
        while not isinstance(node, (ast.FunctionDef, ast.Module)):
            node = parents[node]
        return node

    found = []
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if not isinstance(node, ast.Raise) and name not in _RAISERS:
            continue
        text = HOLE.join(_python_text(part, function_of(node)) for part in call.args)
        if name in ("SystemExit", "exit") and not re.search(r"\w", text):
            continue  # a code
        found.append(Message(path, node.lineno, re.sub(HOLE + "+", HOLE, text)))
    return found


def messages() -> list[Message]:
    """The messages of the library, its module and its front."""
    files = [path for room in ("src", "python", "include") for path in sorted((ROOT / room).rglob("*"))]
    found = _Cpp([path for path in files if path.suffix in (".cc", ".h", ".inl", ".cu")]).messages()
    for path in files:
        if path.suffix == ".py":
            found += _python_messages(path)
    return found


if __name__ == "__main__":
    for message in messages():
        print(str(message).replace("\n", "\\n"))
