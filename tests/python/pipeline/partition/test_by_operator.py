# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model without a chain of blocks, cut by "by_operator" between calls of any modules, trains as it does uncut."""

import families
import pytest
from conftest import run_ranks
from test_any_model import GAS, STEPS, compare

from operators import MODELS, edit_of


def train(name, num_stages, data_size=1, stage=0, gas=GAS, edit=None, **more):
    family, edit = MODELS[name][0], edit or edit_of(name)
    pipeline = {"stages": num_stages, "cut": "by_operator"}
    settings = families.config(stage, gas, num_stages, **more)
    settings["parallel"]["pipeline"] = pipeline
    cut = run_ranks(num_stages * data_size, families.train, family, settings, gas, STEPS, edit)
    more.pop("parallel", None)
    return cut, run_ranks(data_size, families.train, family, families.config(stage, gas, **more), gas, STEPS, edit)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_model_without_blocks_trains_as_the_uncut_one(name, num_stages):
    cut, uncut = train(name, num_stages)
    assert all(each[:2] == cut[0][:2] for each in cut)
    compare([each for each in cut if each[2]], uncut, exact=False)  # a stage may borrow all that it computes with
