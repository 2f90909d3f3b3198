# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The markers of conftest.py do what they say: a test that runs `apart` has ranks that share no memory."""

import edges
import pytest
from conftest import run_ranks


def _summary(world):
    engine = edges.start(world)
    text = engine._core.summary()
    engine.destroy()
    return text


@pytest.mark.both_ways
def test_both_ways_means_shared_and_apart(request):
    apart = request.node.callspec.params["_memory"] == "apart"
    text = run_ranks(2, _summary)[0]
    assert ("no two ranks share memory" in text) == apart, text


@pytest.mark.apart
def test_apart_means_no_shared_memory():
    assert "no two ranks share memory" in run_ranks(2, _summary)[0]
