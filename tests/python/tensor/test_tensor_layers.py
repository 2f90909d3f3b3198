# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that ranks share: outputs and gradients of the whole layers."""

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    make_team,
    vocab_parallel_cross_entropy,
)
from deeptide.tensor.cutting.slices import Slice


def seeded(kind, *args, **more):
    return models.make_model(5, kind=lambda: kind(*args, **more))


def drawn(*shape, seed=3, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient_of(team, parameter, slice_):
    return slice_.join(team.core.all_gather(parameter.grad, "forward"))


def pairs(world, ranks, dtype, blocks, bias):
    """A column- and a row-parallel layer, with what is between them, beside the whole ones."""
    team = make_team(ranks, world, 60.0)
    sizes = blocks or (12,)
    up, down = (
        seeded(nn.Linear, 6, sum(sizes), bias=bias).to(dtype),
        seeded(nn.Linear, sum(sizes), 6, bias=bias).to(dtype),
    )
    up_cut = seeded(ColumnParallelLinear, 6, sum(sizes), bias=bias, team=team, blocks=sizes).to(dtype)
    down_cut = seeded(RowParallelLinear, sum(sizes), 6, bias=bias, team=team, blocks=sizes).to(dtype)
    x, x_cut = (drawn(2, 3, 6, dtype=dtype).requires_grad_() for _ in range(2))
    whole, cut = down(F.gelu(up(x))), down_cut(F.gelu(up_cut(x_cut)))
    whole.backward(drawn(2, 3, 6, seed=4, dtype=dtype))
    cut.backward(drawn(2, 3, 6, seed=4, dtype=dtype))
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.1}
    torch.testing.assert_close(cut, whole, **tolerance)
    torch.testing.assert_close(x_cut.grad, x.grad, **tolerance)
    for name, slice_ in up_cut.tensor_slices.items():
        whole_grad = getattr(up, name).grad
        torch.testing.assert_close(gradient_of(team, getattr(up_cut, name), slice_), whole_grad, **tolerance)
    torch.testing.assert_close(
        gradient_of(team, down_cut.weight, down_cut.tensor_slices["weight"]), down.weight.grad, **tolerance
    )
    if bias:
        torch.testing.assert_close(down_cut.bias.grad, down.bias.grad, **tolerance)
    return cut.detach(), x_cut.grad


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [None, (4, 8, 4), (5, 7)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_column_and_row_parallel_are_the_whole_layers_and_equal_on_all_ranks(ranks, dtype, blocks, bias):
    results = run_ranks(ranks, pairs, ranks, dtype, blocks, bias)
    for output, gradient in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(gradient, results[0][1])


def words(world, vocabulary, padding_idx):
    team = make_team(world.size, world, 60.0)
    embed = seeded(nn.Embedding, vocabulary, 8, padding_idx=padding_idx)
    head = seeded(nn.Linear, 8, vocabulary)
    embed_cut = seeded(VocabParallelEmbedding, vocabulary, 8, padding_idx=padding_idx, team=team)
    head_cut = seeded(ColumnParallelLinear, 8, vocabulary, team=team)
    gathered = seeded(ColumnParallelLinear, 8, vocabulary, team=team, gather_output=True)
    tokens = (torch.arange(15).view(3, 5) * 4) % vocabulary
    labels = tokens.roll(1, 1).clone()
    labels[0, 0] = -100
    x, x_cut = embed(tokens), embed_cut(tokens)
    assert torch.equal(x_cut, x)
    torch.testing.assert_close(gathered(x), head(x))
    losses = F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), reduction="none").view(3, 5)
    losses_cut = vocab_parallel_cross_entropy(head_cut(x_cut), labels, team, vocabulary=vocabulary, reduction="none")
    torch.testing.assert_close(losses_cut, losses)
    F.cross_entropy(head(x).flatten(0, 1), labels.flatten()).backward()
    vocab_parallel_cross_entropy(head_cut(x_cut), labels, team, vocabulary=vocabulary).backward()
    for cut, whole in ((embed_cut, embed), (head_cut, head)):
        for name, slice_ in cut.tensor_slices.items():
            torch.testing.assert_close(gradient_of(team, getattr(cut, name), slice_), getattr(whole, name).grad)
    return losses_cut.detach()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", [12, 13, 19])
@pytest.mark.parametrize("padding_idx", [None, 4])
def test_words_and_their_loss_are_those_of_the_whole_vocabulary(ranks, vocabulary, padding_idx):
    results = run_ranks(ranks, words, vocabulary, padding_idx)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("blocks", [(7,), (1, 5, 2), (2,)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_slices_join_to_the_whole_and_pad_with_zeros(ranks, blocks, dim):
    class Rank:
        size = ranks

    whole = torch.arange(1.0, 1 + 3 * sum(blocks)).view((sum(blocks), 3) if dim == 0 else (3, sum(blocks)))
    slice_ = Slice(dim, blocks)
    cut = []
    for index in range(ranks):
        Rank.index = index
        cut.append(slice_.cut(whole, Rank))
    assert torch.equal(slice_.join(torch.stack(cut)), whole)
    assert sum(part.sum() for part in cut) == whole.sum()


def sums(world, dtype, numel):
    team = make_team(world.size, world, 60.0)
    own = (torch.arange(numel) % 251 + world.rank).to(dtype)
    return team.core.all_reduce(own, "forward"), own


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 3, 50_001])
def test_sums_are_equal_on_all_ranks(ranks, dtype, numel):
    results = run_ranks(ranks, sums, dtype, numel)
    expected = sum(own.double() for _, own in results).to(dtype)
    assert all(torch.equal(total, expected) for total, _ in results)


def test_a_loss_refuses_an_unknown_reduction():
    with pytest.raises(ValueError, match=r"got .most"):
        vocab_parallel_cross_entropy(torch.zeros(1, 2), torch.zeros(1).long(), None, reduction="most")


def test_a_model_with_a_team_is_copied_and_not_pickled():
    import copy
    import pickle

    def rank(world):
        layer = ColumnParallelLinear(4, 4, team=make_team(1, world, 60.0))
        assert copy.deepcopy(layer).tensor_team is layer.tensor_team
        with pytest.raises(TypeError, match="whole_state_dict"):
            pickle.dumps(layer)

    run_ranks(1, rank)


def test_a_team_that_cannot_be_is_refused_with_the_nearest():
    def rank(world):
        with pytest.raises(deeptide.ConfigError, match=r"do not divide into teams of 3; take parallel.tensor 2 or 4"):
            make_team(3, world, 60.0)

    run_ranks(4, rank)
