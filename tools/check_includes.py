#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the house rules that a compiler does not: layer order, cycles, openings, lengths of files and functions."""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LAYERS_FILE = Path("src/layers.txt")
MAX_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_SUBJECTS = 12  # in a folder of DIVIDED, where a header and its sources are one, and in a package of Python
DIVIDED = ("src", "tests", "bench")
PUBLIC = Path("python/deeptide")  # the modules that programs import, each by its own name
SPDX = ("SPDX-FileCopyrightText: The Deeptide authors", "SPDX-License-Identifier: Apache-2.0")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
NAMESPACE = re.compile(r"^namespace (deeptide(?:::\w+)*)", re.MULTILINE)
CODE = {".cc", ".h", ".inl", ".cu", ".cuh", ".py", ".pyi"}
# Heads of what is no function: scopes, and values in braces within a statement.
NO_FUNCTION = re.compile(r"(namespace|class|struct|enum|union|extern)\b")
IS_VALUE = re.compile(r"([=(,{]\s*|\S)$")
# Comments, preprocessor lines, strings and characters; then what divides blocks and statements.
CPP_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|^#(?:[^\n]*\\\n)*[^\n]*"
    r"|R\"(?P<mark>\w*)\(.*?\)(?P=mark)\"|\"(?:\\.|[^\"\\])*\"|(?<!\w)'(?:\\.|[^'\\])+'|[{};]",
    re.DOTALL | re.MULTILINE,
)
LEANING = re.compile(r'(?:^|\s)(?://[/!]?<?|#|""")\s*(Of|What|Where|As)\b')
COMMENT = {".py": "#", ".pyi": "#"}
# Headers whose templates cost seconds in each file, and the folder that compiles them once.
COSTLY = re.compile(r"^#include <(?:fmt/|nlohmann/json\.hpp)", re.MULTILINE)
COMPILED_ONCE = "src/base/libraries/"
# Headers that still declare in `deeptide` itself instead of their layer's namespace.
IN_PUBLIC_NAMESPACE = ("src/base/", "src/device/parallel.h", "src/engine/engine_impl.h")


def includes(text: str) -> list[tuple[int, str]]:
    """Line number and path of each quoted include."""
    matches = ((number, INCLUDE.match(line)) for number, line in enumerate(text.splitlines(), 1))
    return [(number, match[1]) for number, match in matches if match]


class House:
    """The layers and their sub-rooms, lowest first, as src/layers.txt lists them."""

    def __init__(self, text: str):
        lines = [line.partition(":") for line in text.splitlines() if line and not line.startswith("#")]
        self.rooms = {name.strip(): rooms.split() for name, _, rooms in lines}
        self.layers = list(self.rooms)

    def layer_of(self, path: Path) -> str | None:
        return path.parts[1] if len(path.parts) > 2 and path.parts[0] == "src" else None

    @staticmethod
    def room_of(inner: Sequence[str]) -> str:
        """The sub-room of a path below its layer; "." is the layer's own folder."""
        return inner[0] if len(inner) > 1 else "."

    def check_place(self, path: Path) -> list[str]:
        """A file outside all layers, or in a layer with sub-rooms but in none of them."""
        own = self.layer_of(path)
        if own is None:
            return []
        if own not in self.rooms:
            return [f"{path}: folder src/{own} is no layer; the layers are: {' '.join(self.layers)}"]
        rooms = self.rooms[own]
        if rooms and self.room_of(path.parts[2:]) not in rooms:
            return [f"{path}: stands in no sub-room of {own}; they are: {' '.join(rooms)}"]
        return []

    def check_include(self, path: Path, target: str) -> str | None:
        """Why a file of a layer may not include `target`, the path in quotes; None if it may."""
        own, other, *inner = self.layer_of(path), *target.split("/")
        if other not in self.rooms:
            return f'"{target}" is in no layer; the layers are: {" ".join(self.layers)}'
        if self.layers.index(other) > self.layers.index(own):
            return f'{own} includes "{target}", but {other} stands above {own}'
        rooms = self.rooms[own]
        if other != own or not rooms:
            return None
        room, other_room = self.room_of(path.parts[2:]), self.room_of(inner)
        if other_room not in rooms:
            return f'"{target}" is in no sub-room of {own}; they are: {" ".join(rooms)}'
        if rooms.index(other_room) > rooms.index(room):
            return f'{own}/{room} includes "{target}", but {own}/{other_room} stands above {own}/{room}'
        return None


HOUSE = House((Path(__file__).resolve().parent.parent / LAYERS_FILE).read_text(encoding="utf-8"))


def check_layers(path: Path, text: str) -> list[str]:
    """An include of a layer or sub-room that is not below the file's own."""
    public = path.parts[0] == "include"
    if misplaced := HOUSE.check_place(path):
        return misplaced
    if HOUSE.layer_of(path) is None and not public:
        return []
    problems = []
    for number, target in includes(text):
        other = target.split("/")[0]
        if "/" not in target or target.startswith("."):
            problems.append(f'{path}:{number}: "{target}" should be a full path such as "layer/file.h"')
        elif public and other != "deeptide":
            problems.append(f'{path}:{number}: a public header includes "{target}"; only "deeptide/…" is installed')
        elif other == "deeptide" or public:
            continue
        elif why := HOUSE.check_include(path, target):
            problems.append(f"{path}:{number}: {why}")
    return problems


def check_costly(path: Path, text: str) -> list[str]:
    """A layer that includes fmt or nlohmann::json by itself."""
    if HOUSE.layer_of(path) is None or str(path).startswith(COMPILED_ONCE) or not COSTLY.search(text):
        return []
    return [f"{path}: include {COMPILED_ONCE[4:]}*.h, which compiles the library's templates once"]


def check_namespace(path: Path, text: str) -> list[str]:
    """A header of src/ that declares nothing in the namespace of its layer."""
    own = HOUSE.layer_of(path)
    if own is None or path.suffix != ".h" or str(path).startswith(IN_PUBLIC_NAMESPACE):
        return []
    found = NAMESPACE.findall(text)
    if not found or any(name.split("::")[1:2] == [own] for name in found):
        return []
    return [f"{path}: got namespace {found[0]}, expected deeptide::{own}"]


def check_opening(path: Path, text: str) -> list[str]:
    """Two SPDX lines, then a sentence of purpose; headers say #pragma once, but those that Highway includes often."""
    problems = []
    lines = text.splitlines()
    if lines and lines[0].startswith("#!"):
        lines = lines[1:]
    comment = COMMENT.get(path.suffix, "//")
    for index, expected in enumerate(SPDX):
        line = lines[index] if index < len(lines) else ""
        if line != f"{comment} {expected}":
            problems.append(f"{path}:{index + 1}: got '{line}', expected '{comment} {expected}'")
    if path.suffix == ".pyi":
        return problems  # what it is for stands in the module that it describes
    purpose = lines[2] if len(lines) > 2 else ""
    starts = (comment, '"""', 'r"""') if comment == "#" else (comment,)
    if not problems and (not purpose.startswith(starts) or len(purpose.split()) < 3):
        problems.append(f"{path}:3: expected one sentence that says what the file is for, got '{purpose}'")
    included_often = path.name.endswith("-inl.h")
    if path.suffix in {".h", ".cuh"} and not included_often and "#pragma once" not in lines:
        problems.append(f"{path}: a header without #pragma once")
    return problems


def check_words(path: Path, text: str) -> list[str]:
    """A comment begins with a verb or its subject (CONTRIBUTING.md)."""
    return [
        f"{path}:{number}: a comment begins with '{found[1]}'; name its subject or begin with a verb"
        for number, line in enumerate(text.splitlines(), 1)
        if (found := LEANING.search(line))
    ]


def check_length(path: Path, text: str) -> list[str]:
    count = text.count("\n")
    return [f"{path}: {count} lines, at most {MAX_LINES}; split it by subject"] if count > MAX_LINES else []


def python_functions(text: str) -> list[tuple[int, int, str]]:
    """First line, number of lines and name of each function."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(node.lineno, node.end_lineno - node.lineno + 1, node.name) for node in nodes]


def cpp_functions(text: str) -> list[tuple[int, int, str]]:
    """The same of C++, with every block and lambda, by their braces."""
    found, opened, head = [], [], 0  # opened: where each block's head and brace stand; head: that of the next block
    for token in CPP_TOKEN.finditer(text):
        if token[0] == "{":
            head += len(text[head:]) - len(text[head:].lstrip())
            opened.append((head, token.start()))
        elif token[0] == "}" and opened:
            first, brace = opened.pop()
            first = max(first, text.rfind("\n\n", first, brace) + 2)  # a macro before it may end without a semicolon
            if IS_VALUE.search(text[first:brace]):
                head = first
                continue
            if ")" in text[first:brace] and not NO_FUNCTION.match(text[first:brace]):
                count = text.count("\n", first, token.start()) + 1
                found.append((text.count("\n", 0, first) + 1, count, text[first:].partition("\n")[0]))
        elif token[0] != ";" and text[head : token.start()].strip():
            continue  # a string or a comment within a statement
        head = token.end()
    return found


def check_functions(path: Path, text: str) -> list[str]:
    """Functions, tests among them, that are too long."""
    functions = python_functions(text) if path.suffix in {".py", ".pyi"} else cpp_functions(text)
    return [
        f"{path}:{first}: {count} lines, at most {MAX_FUNCTION_LINES} in a function; split it: {name}"
        for first, count, name in functions
        if count > MAX_FUNCTION_LINES
    ]


def find_cycle(graph: dict[str, list[str]]) -> list[str]:
    """The first chain of files that leads back to its start, or nothing."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for target in graph.get(node, []):
            if cycle := visit(target, [*trail, node]):
                return cycle
        done.add(node)
        return []

    for node in sorted(graph):
        if cycle := visit(node, []):
            return cycle
    return []


def check_cycles(texts: dict[Path, str]) -> list[str]:
    """Includes that lead back to where they started; paths are as in an #include."""
    graph = {
        str(Path(*path.parts[1:])): [target for _, target in includes(text)]
        for path, text in texts.items()
        if path.parts[0] in ("src", "include")
    }
    cycle = find_cycle(graph)
    return [f"a cycle of includes: {' -> '.join(cycle)}"] if cycle else []


def check_folders(paths: Sequence[Path]) -> list[str]:
    """Folders of DIVIDED, or packages of Python, that have more subjects than a reader takes in at a glance."""
    subjects: dict[Path, set[str]] = {}
    for path in paths:
        in_package = path.suffix == ".py" and PUBLIC in path.parent.parents
        if path.name != "__init__.py" and (path.parts[0] in DIVIDED or in_package):
            subjects.setdefault(path.parent, set()).add(path.name.split(".")[0].removesuffix("-inl"))
    return [
        f"{folder}: {len(names)} subjects, at most {MAX_SUBJECTS}; give some a room of their own"
        for folder, names in sorted(subjects.items())
        if len(names) > MAX_SUBJECTS
    ]


def check_all(texts: dict[Path, str]) -> list[str]:
    problems = check_cycles(texts) + check_folders(list(texts))
    for path, text in sorted(texts.items()):
        if path.name == "__init__.py" and not text.strip():
            continue
        for check in (
            check_layers,
            check_namespace,
            check_costly,
            check_opening,
            check_words,
            check_length,
            check_functions,
        ):
            problems += check(path, text)
    return problems


def tracked_files(root: Path) -> list[Path]:
    """Code files that git knows, or that it would: a new file is checked before it is added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if listed.returncode == 0:
        names = [Path(name) for name in listed.stdout.splitlines()]
    else:  # an unpacked archive
        folders = ("src", "include", "python", "tests", "examples", "bench", "tools")
        names = [file.relative_to(root) for folder in folders for file in (root / folder).rglob("*")]
    return sorted(name for name in set(names) if name.suffix in CODE and (root / name).is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    texts = {path: (root / path).read_text(encoding="utf-8") for path in tracked_files(root)}
    problems = check_all(texts)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"check_includes: {len(texts)} files, {len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
