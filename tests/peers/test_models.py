# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A sample of Transformers' architectures, small: ranks that share or divide a model update it as one rank does.

Losses and the updates of all parameters are compared. The page docs/models.md is the list of what these tests expect.
THOROUGH=1 runs all classes of the page.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import sweep

PAGE = {name: expected for name, expected in sorted(sweep.read_page().items()) if isinstance(expected, dict)}
SAMPLE = list(PAGE)[:: 1 if os.environ.get("THOROUGH") else 16]


@pytest.mark.parametrize("classes", [SAMPLE[at : at + 4] for at in range(0, len(SAMPLE), 4)], ids=lambda each: each[0])
def test_ranks_that_share_or_divide_a_model_update_it_as_one_does(classes):
    """A process of its own forks the ranks."""
    done = subprocess.run(
        [sys.executable, str(Path(sweep.__file__)), *classes], capture_output=True, text=True, check=True
    )
    for name, line in zip(classes, done.stdout.splitlines(), strict=True):
        found = ast.literal_eval(line.split(" ", 2)[2])
        for axis, outcome in found.items():
            assert outcome.startswith(("trains", "refused")), (name, axis, outcome)
            if PAGE[name][axis] != "not run":
                assert outcome.split(":")[0] == PAGE[name][axis].split(":")[0], (name, axis, outcome)
