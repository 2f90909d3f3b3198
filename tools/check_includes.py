#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the house rules that a compiler does not: layer order, cycles, file openings and lengths."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

# Lowest first: a layer includes those before it only.
LAYERS = [
    *("base", "trace", "config", "world", "device", "tiers", "numerics", "host", "comm", "bench", "sharding"),
    *("gradients", "optim", "ops", "zero", "checkpoint", "data", "engine", "launch"),
]
MAX_LINES = 500
SPDX = ("SPDX-FileCopyrightText: The Deeptide authors", "SPDX-License-Identifier: Apache-2.0")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
CODE = {".cc", ".h", ".cu", ".cuh", ".py", ".pyi"}
COMMENT = {".py": "#", ".pyi": "#"}


def includes(text: str) -> list[tuple[int, str]]:
    """Line number and path of each quoted include."""
    matches = ((number, INCLUDE.match(line)) for number, line in enumerate(text.splitlines(), 1))
    return [(number, match[1]) for number, match in matches if match]


def layer_of(path: Path) -> str | None:
    return path.parts[1] if len(path.parts) > 2 and path.parts[0] == "src" else None


def check_layers(path: Path, text: str) -> list[str]:
    """An include of a layer that is not below the file's own."""
    own = layer_of(path)
    public = path.parts[0] == "include"
    if own is not None and own not in LAYERS:
        return [f"{path}: folder src/{own} is no layer; the layers are: {' '.join(LAYERS)}"]
    if own is None and not public:
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
        elif other not in LAYERS:
            problems.append(f'{path}:{number}: "{target}" is in no layer; the layers are: {" ".join(LAYERS)}')
        elif LAYERS.index(other) > LAYERS.index(own):
            problems.append(f'{path}:{number}: {own} includes "{target}", but {other} stands above {own}')
    return problems


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
    once_per_target = path.name.endswith("-inl.h")
    if path.suffix in {".h", ".cuh"} and not once_per_target and "#pragma once" not in lines:
        problems.append(f"{path}: a header without #pragma once")
    return problems


def check_length(path: Path, text: str) -> list[str]:
    count = text.count("\n")
    return [f"{path}: {count} lines, at most {MAX_LINES}; split it by subject"] if count > MAX_LINES else []


def find_cycle(graph: dict[str, list[str]]) -> list[str]:
    """The first chain of files that leads back to its start, or nothing."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return trail[trail.index(node) :] + [node]
        if node in done:
            return []
        for target in graph.get(node, []):
            if cycle := visit(target, trail + [node]):
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


def check_all(texts: dict[Path, str]) -> list[str]:
    problems = check_cycles(texts)
    for path, text in sorted(texts.items()):
        if path.name == "__init__.py" and not text.strip():
            continue
        for check in (check_layers, check_opening, check_length):
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
