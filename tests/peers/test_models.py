# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""All of Transformers' architectures, small: two ranks that share or divide a model update it as one rank does.

Losses and the updates of all parameters are compared. What is refused is on the page docs/models.md, which is the list
of what these tests expect.
"""

import pytest

pytest.importorskip("transformers")
import sweep

PAGE = sweep.read_page()


@pytest.mark.parametrize("name", sweep.names())
def test_ranks_that_share_or_divide_a_model_update_it_as_one_does(name):
    expected = PAGE.get(name)
    if expected == "not shown":
        pytest.skip("one rank alone does not train it from words, a picture or a sound, or not twice alike")
    found = sweep.outcomes(name)
    assert isinstance(found, dict), found
    assert expected is not None, f"{name} is not in docs/models.md: python tests/peers/sweep.py {name}"
    for axis, outcome in found.items():
        assert outcome.startswith(("trains", "refused")), (axis, outcome)
        if expected[axis] != "not run":
            assert outcome.split(":")[0] == expected[axis].split(":")[0], (axis, outcome)
