# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which links tools/check_links.py takes for dead."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import check_links


class Links(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "other.md").write_text(
            "# Any `code` of [a page](x)\n\n```\n# no heading\n```\n", encoding="utf-8"
        )

    def problems(self, text: str) -> list[str]:
        page = self.folder / "page.md"
        page.write_text(text, encoding="utf-8")
        check_links.anchors.cache_clear()
        return check_links.problems_of(page)

    def test_that_lead_somewhere_pass(self):
        text = (
            "# Here, it's\n[a](other.md) [b](other.md#any-code-of-a-page) [c](#here-its) [d](https://example.org/x)\n"
        )
        self.assertEqual(self.problems(text), [])

    def test_that_lead_nowhere_are_named_with_their_line(self):
        self.assertIn("page.md:2: gone.md is not there", self.problems("\n[a](gone.md)\n")[0])
        self.assertIn("has no heading #no-heading", self.problems("[a](other.md#no-heading)\n")[0])
        self.assertIn("has no heading #there", self.problems("# Here\n\n[a](#there)\n")[0])

    def test_in_code_are_none(self):
        self.assertEqual(self.problems("```\n[a](gone.md)\n```\n"), [])


if __name__ == "__main__":
    unittest.main()
