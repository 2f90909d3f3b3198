# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The house rules' checker: what it accepts, and what each breach is told."""

import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_includes  # noqa: E402

OPENING = "".join(f"// {line}\n" for line in (*check_includes.SPDX, "Says what this is for."))


def problems(files: dict[str, str]) -> str:
    return "\n".join(check_includes.check_all({Path(name): text for name, text in files.items()}))


def source(*included: str, header: bool = False) -> str:
    return OPENING + ("#pragma once\n" if header else "") + "".join(f'#include "{name}"\n' for name in included)


class CheckIncludes(unittest.TestCase):
    def test_accepts_layers_below_and_public_headers(self):
        files = {
            "src/base/log.h": source(header=True),
            "src/launch/job/agent.cc": source("launch/job/agent.h", "launch/plan/options.h", "trace/flight_ring.h"),
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

    def test_refuses_a_sub_room_above(self):
        path = "src/launch/plan/options.cc"
        self.assertEqual(problems({path: source("launch/plan/options.h", "launch/system/shell.h")}), "")
        found = problems({path: source("launch/job/agent.h")})
        self.assertIn(
            f'{path}:4: launch/plan includes "launch/job/agent.h", but launch/job stands above launch/plan', found
        )
        self.assertIn("in no sub-room of launch", problems({path: source("launch/options.h")}))
        self.assertIn("in no sub-room of launch", problems({"src/launch/options.cc": source()}))
        self.assertIn("in no sub-room of launch", problems({"src/launch/things/options.cc": source()}))

    def test_orders_a_layers_own_folder_among_its_sub_rooms(self):
        self.assertEqual(problems({"src/config/config.cc": source("config/batch.h", "config/check/rules.h")}), "")
        self.assertEqual(problems({"src/config/check/rules.cc": source("config/table/schema.h")}), "")
        found = problems({"src/config/check/rules.cc": source("config/batch.h")})
        self.assertIn('config/check includes "config/batch.h", but config/. stands above config/check', found)
        found = problems({"src/config/table/schema.cc": source("config/check/rules.h")})
        self.assertIn("but config/check stands above config/table", found)
        self.assertIn("in no sub-room of config", problems({"src/config/things/batch.cc": source()}))

    def test_knows_included_sources(self):
        inlined = {"src/ops/vector.inl": source("zero/stage.h"), "src/gradients/rows-inl.h": source()}
        self.assertIn("zero stands above ops", problems(inlined))
        self.assertEqual(problems({"src/ops/vector.inl": source(), "src/gradients/rows-inl.h": source()}), "")
        self.assertIn(".inl", check_includes.CODE)

    def test_wants_a_header_in_the_namespace_of_its_layer(self):
        def in_namespace(name: str) -> dict[str, str]:
            return {"src/comm/group.h": source(header=True) + f"namespace {name} {{}}\n"}

        self.assertEqual(problems(in_namespace("deeptide::comm")), "")
        for name in ("deeptide", "deeptide::sharding", "deeptide::communication"):
            self.assertIn(f"got namespace {name}, expected deeptide::comm", problems(in_namespace(name)))

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
            "one sentence", problems({"src/base/a.cc": OPENING.replace("// Says what this is for.\n", "") + "int x;\n"})
        )
        self.assertIn("without #pragma once", problems({"src/base/a.h": OPENING}))
        python = OPENING.replace("//", "#")
        self.assertEqual(problems({"tools/a.py": "#!/usr/bin/env python3\n" + python}), "")
        self.assertEqual(
            problems({"tools/a.py": python.replace("# Says what this is for.", '"""Says what this is for."""')}), ""
        )

    def test_refuses_comments_that_lean_on_what_follows(self):
        for words in ("Of a unit.", "Where it lies.", "As above."):
            for begin in ("///", "int x;  //"):
                found = problems({"src/base/a.cc": f"{OPENING}{begin} {words}\n"})
                self.assertIn(f"src/base/a.cc:4: a comment begins with '{words.split()[0]}'", found)
        self.assertEqual(problems({"src/base/a.cc": OPENING + "// Offers what it has.\n"}), "")

    def test_refuses_long_files(self):
        self.assertIn("501 lines, at most 500", problems({"src/base/a.cc": OPENING + "\n" * 498}))
        self.assertEqual(problems({"src/base/a.cc": OPENING + "\n" * 497}), "")

    def test_refuses_folders_of_too_many_subjects(self):
        files = [Path(f"src/io/part{n}.{ending}") for n in range(12) for ending in ("cc", "h")]
        self.assertEqual(check_includes.check_folders(files), [])
        (problem,) = check_includes.check_folders([*files, Path("src/io/one_more.h"), Path("src/io/writers/other.h")])
        self.assertIn("src/io: 13 subjects, at most 12", problem)

    def test_counts_subjects_of_tests_and_benchmarks_too(self):
        for folder, ending in (("tests/io", "_test.cc"), ("tests/python/io", ".py"), ("bench/io", ".py")):
            files = [Path(folder, f"test_part{n}{ending}") for n in range(12)]
            self.assertEqual(check_includes.check_folders([*files, Path(folder, "__init__.py")]), [])
            (problem,) = check_includes.check_folders([*files, Path(folder, "models.h"), Path(folder, "far/other.py")])
            self.assertIn(f"{folder}: 13 subjects, at most 12", problem)
        self.assertEqual(check_includes.check_folders([Path(f"tools/tool{n}.py") for n in range(13)]), [])

    def test_refuses_packages_of_too_many_modules_but_for_the_public_ones(self):
        names = ["__init__", *(f"part{n}" for n in range(13))]
        self.assertEqual(check_includes.check_folders([Path(f"python/deeptide/{name}.py") for name in names]), [])
        files = [Path(f"python/deeptide/tensor/{name}.py") for name in names]
        self.assertEqual(check_includes.check_folders(files[:-1]), [])
        (problem,) = check_includes.check_folders(files)
        self.assertIn("python/deeptide/tensor: 13 subjects, at most 12", problem)

    def test_refuses_long_functions_of_both_languages(self):
        body = "  f();\n" * 59
        self.assertEqual(problems({"src/base/a.cc": OPENING + f"void g(int x) {{\n{body[7:]}}}\n"}), "")
        for head, tail in (
            ("void g(int x) {\n", "}"),
            ("TEST_F(Subject,\n       Does) {\n", "}"),
            ("A::A(int x)\n    : a_{x} {\n", "}"),
            ("const auto g = [](int x) {\n", "};"),
        ):
            # A brace in a string, a character or a comment is none.
            text = f'namespace a {{\nint y;\n{head}  s = "}}" + R"({{)" + \'{{\';  // }}\n{body}{tail}\n}}\n'
            found = problems({"tests/base/a_test.cc": OPENING + text})
            self.assertRegex(found, r"^tests/base/a_test.cc:6: 6[23] lines, at most 60 in a function; split it: ")
            self.assertEqual(found.count("\n"), 0, found)
        scope = f"struct B {{\n{body}}};\n"
        table = "const Row kRows[] = {\n" + '    {"a(", 1},\n' * 70 + "};\n"
        self.assertEqual(problems({"src/base/a.cc": OPENING + f"namespace a {{\n{scope}{table}}}\n"}), "")
        python = OPENING.replace("//", "#") + "class A:\n    def g(self):\n"
        self.assertEqual(problems({"tools/a.py": python + "        f()\n" * 59}), "")
        self.assertIn("tools/a.py:5: 61 lines", problems({"tools/a.py": python + "        f()\n" * 60}))


class Layers(unittest.TestCase):
    def test_stand_in_the_documents_in_the_order_of_the_list(self):
        built = [layer for layer in check_includes.HOUSE.layers if (ROOT / "src" / layer).is_dir()]
        for document in ("docs/architecture.md", "CONTRIBUTING.md"):
            text = (ROOT / document).read_text(encoding="utf-8")
            table = text[text.index("\n| layer |") :].split("\n\n")[0]
            self.assertEqual(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE), built, document)

    def test_stand_in_the_list_once_and_have_all_folders(self):
        house = check_includes.HOUSE
        folders = {path.name for path in (ROOT / "src").iterdir() if path.is_dir()}
        self.assertEqual(folders - set(house.layers), set())
        for layer, rooms in house.rooms.items():
            if rooms:
                inner = {path.name for path in (ROOT / "src" / layer).iterdir() if path.is_dir()}
                self.assertEqual(inner, set(rooms) - {"."}, layer)


if __name__ == "__main__":
    unittest.main()
