# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Names that scripts import from deepspeed.compression, up to 0.19.6: quantizers, kinds of layers, functions."""

import json

import pytest
import torch
from test_compression import BIAS, THEIRS, WEIGHT, bits, grid, section
from torch import nn

from deeptide.as_deepspeed import NotSupportedError
from deeptide.as_deepspeed.names.modules import resolve
from deeptide.as_deepspeed.names.table import MODULES
from deeptide.compression import CompressionSchedule, init_compression, redundancy_clean, student_initialization


def theirs(module, name):
    return resolve(f"deepspeed.{module}", name, MODULES[f"deepspeed.{module}"][name])


class Conv1D(nn.Module):
    """GPT-2's layer: its weight is (inputs, outputs)."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(grid(6, 4, seed=1)), nn.Parameter(BIAS.clone())

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def test_deepspeeds_names_are_these():
    for module in ("compression", "compression.compress"):
        assert theirs(module, "init_compression") is init_compression
        assert theirs(module, "redundancy_clean") is redundancy_clean
    assert theirs("compression.compress", "student_initialization") is student_initialization
    assert theirs("compression.scheduler", "compression_scheduler") is CompressionSchedule
    assert theirs("runtime.quantize", "Quantizer") and theirs("runtime.eigenvalue", "Eigenvalue")
    model = nn.Sequential(Conv1D())
    x = grid(3, 6, seed=5)
    expected = model(x)
    assert theirs("compression", "convert_conv1d_to_linear")(model, Conv1D) is model
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("case", THEIRS["quantized"], ids=lambda c: "{dtype}-{bits}-{kind}-{groups}".format(**c))
def test_quantizers_called_by_themselves_round_and_pass_gradients(case):
    kind = {1: "Binary", 2: "Ternary"}.get(case["bits"], "Sym" if case["kind"] == "symmetric" else "Asym")
    quantizer = theirs("compression.utils", f"{kind}Quantizer")
    weight = WEIGHT.to(getattr(torch, case["dtype"]), copy=True).requires_grad_()
    got = quantizer.apply(weight, case["bits"], None, None, case["groups"])
    assert got.dtype == weight.dtype and got.float().flatten().tolist() == case["values"]
    upstream = grid(4, 6, seed=9).to(weight.dtype)
    got.backward(upstream)
    assert torch.equal(weight.grad, upstream)


def test_quantizers_take_a_range():
    x = torch.tensor([-3.0, -0.6, 0.1, 0.9, 7.0])
    symmetric, asymmetric = (theirs("compression.utils", f"{kind}Quantizer").apply for kind in ("Sym", "Asym"))
    assert symmetric(x, 4, torch.tensor(-2.0), torch.tensor(1.0)).tolist() == [-2.0, -0.5, 0.0, 1.0, 1.75]
    assert asymmetric(x, 4, torch.tensor(-1.0), torch.tensor(3.0)).tolist() == [-1.0, -0.5, 0.0, 1.0, 2.75]
    for ends, groups in (((None, 1.0), 1), ((-1.0, 1.0), 5)):
        with pytest.raises(ValueError, match="expected both ends and one group, or no end"):
            symmetric(x, 4, *ends, groups)


def test_the_mask_of_the_largest_trains_scores_and_its_threshold():
    topk = theirs("compression.utils", "TopKBinarizer").apply
    scores = torch.tensor([[0.5, -1.0], [2.0, 0.1]], requires_grad=True)
    upstream = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mask = topk(scores, 0.5, False)
    mask.backward(upstream)
    assert mask.tolist() == [[1, 0], [1, 0]] and torch.equal(scores.grad, upstream)
    threshold = torch.zeros(1, requires_grad=True)  # a sigmoid of one half
    assert torch.equal(topk(scores, threshold, True), mask)
    topk(scores, threshold, True).backward(upstream)
    assert threshold.grad.tolist() == [4.0]


def test_ranges_of_activations_follow_them_while_training():
    act = theirs("compression.basic_layer", "QuantAct")(act_range_momentum=0.5)
    x = torch.tensor([-1.0, 0.3, 3.0], requires_grad=True)
    act(x, 8)
    act(3 * x, 8)
    assert act.state_dict()["x_min_max"].tolist() == [-2.0, 6.0]
    act.eval()
    rounded = act(x, 4)
    assert rounded.tolist() == [-0.75, 0.0, 3.0] and act.x_min_max.tolist() == [-2.0, 6.0]
    rounded.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def test_compressed_layers_are_of_deepspeeds_kinds():
    kinds = [
        theirs("compression.basic_layer", f"{kind}_Compress") for kind in ("LinearLayer", "Conv2dLayer", "Embedding")
    ]
    config = bits(8, 4, modules=["0", "1", "2"])
    model = nn.ModuleList([nn.Linear(6, 4), nn.Conv2d(3, 4, 2), nn.Embedding(4, 6)])
    assert not any(isinstance(layer, kind) for layer in model for kind in kinds)
    init_compression(model, config)
    assert [[isinstance(layer, kind) for kind in kinds] for layer in model] == torch.eye(3).bool().tolist()
    redundancy_clean(model, config)
    assert not any(isinstance(layer, kind) for layer in model for kind in kinds)
    with pytest.raises(NotSupportedError, match=r"LinearLayer_Compress.*: init_compression makes compressed layers"):
        kinds[0](6, 4)


def test_small_functions_answer_and_others_name_what_to_use(tmp_path):
    compressible = theirs("compression.helper", "is_module_compressible")
    assert compressible(nn.BatchNorm2d(4)) and not compressible(nn.LayerNorm(4))
    config = section("row_pruning", {"dense_ratio": 0.5})
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = theirs("compression.compress", "check_deepspeed_config")
    assert read(config) is config and read(str(tmp_path / "config.json")) == config
    for module, name, text in (
        ("helper", "module_replacement", "init_compression prepares layers in place"),
        ("helper", "generate_pruners", "never published; use the method topk or l1"),
        ("basic_layer", "ColumnParallelLinear_Compress", "parallel.tensor cuts models"),
    ):
        with pytest.raises(NotSupportedError, match=f"deepspeed.compression.{module}.{name} is not supported.*{text}"):
            theirs(f"compression.{module}", name)()
