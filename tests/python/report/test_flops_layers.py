# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Every layer of torch.nn that multiplies, and torch's other products: counted, or named as not counted; never 0."""

import pytest
import torch
from torch import nn

from deeptide.flops_profiler import FlopsProfiler

B, L, D = 2, 5, 8
LINEAR = B * L * D * D
COUNTED = {
    "Linear": (nn.Linear(D, D), LINEAR),
    "Bilinear": (nn.Bilinear(D, D, 3), None),
    "RNN": (nn.RNN(D, D), 2 * LINEAR),
    "GRU": (nn.GRU(D, D), 6 * LINEAR),
    "LSTM": (nn.LSTM(D, D), 8 * LINEAR),
    "LSTM with a projection": (nn.LSTM(D, D, proj_size=4), None),
    "MultiheadAttention": (nn.MultiheadAttention(D, 2, batch_first=True), None),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(D, 2, 16, batch_first=True), None),
    "TransformerEncoderLayer, eval": (nn.TransformerEncoderLayer(D, 2, 16, batch_first=True).eval(), None),
    "Conv1d": (nn.Conv1d(L, 4, 3), B * 4 * 6 * L * 3),
    "ConvTranspose1d": (nn.ConvTranspose1d(L, 4, 3), B * L * D * 4 * 3),
}
NAMED = {
    "factors": (torch.linalg.qr, "aten::linalg_qr"),
    "singular values": (torch.linalg.svdvals, "aten::_linalg_svd"),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + 9 * torch.eye(L)), "aten::linalg_cholesky_ex"),
    "fft": (torch.fft.rfft, "aten::_fft_r2c"),
    "distances": (lambda x: torch.cdist(x, x), "aten::_cdist_forward"),
    "grid": (lambda x: nn.functional.grid_sample(x[:, None], torch.zeros(B, 2, 2, 2)), "aten::grid_sampler_2d"),
    "bag": (lambda x: nn.EmbeddingBag(4, D)(torch.zeros(B, 3, dtype=torch.long)), "aten::_embedding_bag"),
}


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def profiled(model, *inputs):
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(*inputs)
    profiler.stop_profile()
    return profiler


@pytest.mark.parametrize("layer", COUNTED)
def test_a_layer_that_multiplies_is_counted(layer):
    module, macs = COUNTED[layer]
    x = torch.randn(B, L, D)
    profiler = profiled(module, *([x, x] if layer == "Bilinear" else [x, x, x] if "Multihead" in layer else [x]))
    assert profiler.get_total_macs() > 0
    assert macs is None or profiler.get_total_macs() == macs
    assert profiler.uncounted() == {}


@pytest.mark.parametrize("operator", NAMED)
def test_a_product_without_a_formula_is_named(operator, capsys):
    function, name = NAMED[operator]
    profiler = profiled(Applied(function), torch.randn(B, L, D))
    assert profiler.uncounted() == {name: 1}
    profiler.print_model_profile()
    assert f"{name} x 1" in capsys.readouterr().out


def test_what_only_moves_or_adds_is_not_named():
    block = nn.Sequential(nn.LayerNorm(D), nn.GELU(), nn.Dropout(0.1), nn.Softmax(-1), nn.CosineSimilarity(-1))
    assert profiled(block[:4], torch.randn(B, L, D)).uncounted() == {}
    assert profiled(block[4], torch.randn(B, D), torch.randn(B, D)).uncounted() == {}


def test_an_operator_of_another_library_is_named():
    @torch.library.custom_op("flops_test::product", mutates_args=())
    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() @ x.numpy().swapaxes(-1, -2))

    assert profiled(Applied(product), torch.randn(B, L, D)).uncounted() == {"flops_test::product": 1}
