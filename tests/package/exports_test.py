# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Compares what the shared library exports with what the public headers mark: neither more nor less.

Run as: exports_test.py <libdeeptide.so> <nm>.
"""

import re
import subprocess
import sys
import unittest
from pathlib import Path

HEADERS = Path(__file__).resolve().parents[2] / "include" / "deeptide"
MARKED_CLASS = re.compile(r"^\s*(?:class|struct) DEEPTIDE_API (\w+)")
ENUMERATION = re.compile(r"^enum class (\w+)")  # the compiler does not hide their type information
MARKED_FUNCTION = re.compile(r"^\s*DEEPTIDE_API [^(]*?(\w+)\(")
# A function of a namespace, declared here and defined elsewhere: its type or its mark stands in the first column.
FUNCTION = re.compile(r"^(?!inline|using|template|class|struct|enum)[A-Za-z][^={(]*[\s&*](\w+)\((?!.*\) \{)")
CLASS = re.compile(r"^(?:class|struct) (?:DEEPTIDE_API )?(\w+)[^;]*\{")
METHOD = re.compile(r"^  (?!using|friend|//)[^={(]*\([^{]*\)(?: const)?(?: noexcept)?;")
LIBRARY, NM = sys.argv[1:3] if len(sys.argv) > 2 else ("", "")


def lines_of_headers() -> list[str]:
    return [line for path in sorted(HEADERS.glob("*.h")) for line in path.read_text(encoding="utf-8").splitlines()]


def qualified_name(symbol: str) -> str:
    """`deeptide::Engine::step` of "deeptide::Engine::step()" and of "vtable for deeptide::Engine"."""
    name = re.sub(r"^(?:typeinfo(?: name)?|vtable|VTT) for ", "", symbol)
    return re.sub(r"\[abi:\w+\]", "", name).partition("(")[0]


def marked(pattern: re.Pattern[str]) -> set[str]:
    """The names that the pattern finds in the headers."""
    found = (pattern.match(line) for line in lines_of_headers())
    return {match[1] for match in found if match}


def exported() -> list[str]:
    output = subprocess.run(
        [NM, "--dynamic", "--demangle", "--defined-only", LIBRARY], check=True, capture_output=True, text=True
    ).stdout
    return [line.split(maxsplit=2)[2] for line in output.splitlines() if line]


class Exports(unittest.TestCase):
    def test_only_what_headers_mark(self):
        classes = marked(MARKED_CLASS) | marked(ENUMERATION)
        functions = marked(MARKED_FUNCTION) | {"version"}  # in cmake/version.h.in
        strangers = []
        for symbol in exported():
            names = [part for part in qualified_name(symbol).split("::") if part]
            public = names[0] == "deeptide" and (names[-1] in functions or not classes.isdisjoint(names[1:]))
            if not public or "Impl" in names:
                strangers.append(symbol)
        self.assertEqual(strangers, [], "exported, but in no header of include/deeptide")

    def test_all_functions_that_headers_mark(self):
        names = {qualified_name(symbol).rpartition("::")[2] for symbol in exported()}
        self.assertEqual(marked(MARKED_FUNCTION) - names, set(), "marked, but not exported")

    def test_headers_mark_each_function(self):
        functions = [line for line in lines_of_headers() if FUNCTION.match(line)]
        self.assertGreater(len(functions), 20)
        unmarked = [line for line in functions if not line.startswith("DEEPTIDE_API ")]
        self.assertEqual(unmarked, [], "these functions lack DEEPTIDE_API")

    def test_headers_mark_each_class_with_code_elsewhere(self):
        owner, found = "", set()
        for line in lines_of_headers():
            if match := CLASS.match(line):
                owner = match[1]
            elif line.startswith("}"):
                owner = ""
            elif owner and METHOD.match(line):
                found.add(owner)
        self.assertIn("Engine", found)
        self.assertEqual(found - marked(MARKED_CLASS), set(), "these classes lack DEEPTIDE_API")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
