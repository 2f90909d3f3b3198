# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The gate under several Python threads of one rank."""

import threading

import models
import pytest
import torch
from conftest import run_ranks
from gated import assert_same_gradients, engine_of, gradients_of, inputs, on_plain

pytestmark = pytest.mark.apart

TOKENS, TARGETS = models.batches(1, 2)[0]


def test_forward_in_several_threads_of_one_rank():
    """Two threads of a rank compute on different blocks, all ranks alike or not."""
    expected = {}
    plain = models.make_model()
    for i in range(3):
        with torch.no_grad():
            expected[i] = plain.h[i](inputs(4, 20))

    def rank(world):
        found, errors = {}, []

        def work(block):
            try:
                torch.set_num_threads(1)
                for _ in range(15):
                    with torch.no_grad():
                        found[block] = engine.module.h[block](inputs(4, 20))
            except BaseException as error:
                errors.append(error)

        with engine_of(world, models.TinyModel) as engine:
            threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert not errors, errors
            engine.module(TOKENS, TARGETS).backward()
            engine.step()
        return found

    for found in run_ranks(2, rank):
        assert all(torch.equal(found[i], expected[i]) for i in expected)


def test_backward_in_another_thread():
    _, expected = on_plain(models.TinyModel, lambda m: m(TOKENS, TARGETS))

    def rank(world):
        with engine_of(world, models.TinyModel) as engine:
            loss = engine.module(TOKENS, TARGETS)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            return gradients_of(engine)

    for found in run_ranks(2, rank):
        assert_same_gradients(found, expected)
