# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The house rules' checker: what it accepts, and what each breach is told."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import check_includes  # noqa: E402

OPENING = "".join(f"// {line}\n" for line in (*check_includes.SPDX, "What this is for."))


def problems(files: dict[str, str]) -> str:
    return "\n".join(check_includes.check_all({Path(name): text for name, text in files.items()}))


def source(*included: str, header: bool = False) -> str:
    return OPENING + ("#pragma once\n" if header else "") + "".join(f'#include "{name}"\n' for name in included)


class CheckIncludes(unittest.TestCase):
    def test_accepts_layers_below_and_public_headers(self):
        files = {
            "src/base/log.h": source(header=True),
            "src/zero/stage.cc": source("zero/stage.h", "base/log.h", "sharding/unit.h", "deeptide/config.h"),
            "include/deeptide/engine.h": source("deeptide/config.h", header=True),
            "tests/zero/stage_test.cc": source("zero/stage.h", "launch/launched.h"),
        }
        self.assertEqual(problems(files), "")

    def test_refuses_a_layer_above(self):
        found = problems({"src/comm/group.cc": source("engine/engine.h")})
        self.assertIn('src/comm/group.cc:4: comm includes "engine/engine.h", but engine stands above comm', found)

    def test_refuses_unknown_layers_and_relative_paths(self):
        self.assertIn("in no layer", problems({"src/comm/group.cc": source("misc/things.h")}))
        self.assertIn("src/misc is no layer", problems({"src/misc/things.cc": source()}))
        for path in ("group.h", "../base/log.h"):
            self.assertIn("should be a full path", problems({"src/comm/group.cc": source(path)}), path)

    def test_refuses_internals_in_public_headers(self):
        files = {"include/deeptide/engine.h": source("zero/stage.h", header=True)}
        self.assertIn('a public header includes "zero/stage.h"', problems(files))

    def test_finds_cycles(self):
        files = {
            "src/comm/a.h": source("comm/b.h", header=True),
            "src/comm/b.h": source("comm/c.h", header=True),
            "src/comm/c.h": source("comm/a.h", header=True),
        }
        self.assertIn("a cycle of includes: comm/a.h -> comm/b.h -> comm/c.h -> comm/a.h", problems(files))

    def test_wants_the_opening_lines(self):
        self.assertIn("expected '// SPDX-FileCopyrightText", problems({"src/base/a.cc": "int x;\n"}))
        self.assertIn(
            "one sentence", problems({"src/base/a.cc": OPENING.replace("// What this is for.\n", "") + "int x;\n"})
        )
        self.assertIn("without #pragma once", problems({"src/base/a.h": OPENING}))
        python = OPENING.replace("//", "#")
        self.assertEqual(problems({"tools/a.py": "#!/usr/bin/env python3\n" + python}), "")
        self.assertEqual(problems({"tools/a.py": python.replace("# What this is for.", '"""What this is for."""')}), "")

    def test_refuses_long_files(self):
        self.assertIn("501 lines, at most 500", problems({"src/base/a.cc": OPENING + "\n" * 498}))
        self.assertEqual(problems({"src/base/a.cc": OPENING + "\n" * 497}), "")


if __name__ == "__main__":
    unittest.main()
