# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose later blocks, or loss, use what earlier blocks returned train on stages as they do uncut."""

import pytest
import torch
from skipping import MODELS
from test_any_model import GAS, STEPS, both, compare

GRID = ["mixtral", "unet"]


def train(name, num_stages, data_size=1, stage=0, gas=2, edit=None, **more):
    family, change = MODELS[name]
    return both(family, num_stages, data_size, stage, gas, (lambda m: edit(change(m))) if edit else change, **more)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_model_with_values_that_skip_trains_as_uncut(name, num_stages):
    """Gradients of a value that several stages use are added in another order, so within rounding."""
    compare(*train(name, num_stages), exact=False)
