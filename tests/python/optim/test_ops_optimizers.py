# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's classes of optimizers: what they hold is what the configuration's optimizer of that name computes."""

import models
import pytest
import torch

import deeptide
from deeptide.ops.adagrad import DeepSpeedCPUAdagrad
from deeptide.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deeptide.ops.lamb import FusedLamb
from deeptide.ops.lion import DeepSpeedCPULion, FusedLion

COMMON = {"lr": 1e-2, "weight_decay": 0.1}
ADAM = {**COMMON, "betas": (0.8, 0.9), "eps": 1e-5}
CASES = {
    "FusedAdam": (FusedAdam, ADAM, "AdamW", {}),
    "FusedAdam-L2": (FusedAdam, {**ADAM, "adam_w_mode": False}, "Adam", {}),
    "FusedAdam-uncorrected": (FusedAdam, {**ADAM, "bias_correction": False}, "AdamW", {}),
    "CPUAdam": (DeepSpeedCPUAdam, ADAM, "AdamW", {}),
    "CPUAdam-L2": (DeepSpeedCPUAdam, {**ADAM, "adamw_mode": False}, "Adam", {"adam_w_mode": False}),
    "CPUAdagrad": (DeepSpeedCPUAdagrad, {**COMMON, "eps": 1e-5}, "Adagrad", {}),
    "FusedLion": (FusedLion, {**COMMON, "betas": (0.8, 0.9)}, "Lion", {}),
    "CPULion": (DeepSpeedCPULion, {**COMMON, "betas": (0.8, 0.9)}, "Lion", {}),
    "FusedLamb": (FusedLamb, {**ADAM, "max_coeff": 2.0, "min_coeff": 0.1, "eps_inside_sqrt": True}, "Lamb", {}),
}


def train(**arguments):
    model = arguments["model"]
    engine = deeptide.initialize(**arguments)[0]
    for tokens, targets in models.batches(3, 4):
        engine.backward(engine(tokens, targets))
        assert engine.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_a_class_computes_what_the_configuration_does(case):
    make, options, kind, renamed = CASES[case]
    params = {key: value for key, value in options.items() if key != "adamw_mode"} | renamed
    params = {key: list(value) if isinstance(value, tuple) else value for key, value in params.items()}
    model = models.make_model()
    expected = train(model=model, config=models.config(2, optimizer={"type": kind, "params": params}))
    model = models.make_model()
    config = {key: value for key, value in models.config(2).items() if key != "optimizer"}
    got = train(model=model, config=config, optimizer=make(model.parameters(), **options))
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_groups_of_a_class_keep_their_own_values():
    model = models.make_model()
    first, *rest = model.parameters()
    optimizer = FusedLamb([{"params": [first], "lr": 0.5, "max_coeff": 1.0}, {"params": rest}], lr=0.25)
    engine = deeptide.initialize(model=model, optimizer=optimizer, config=models.config(1))[0]
    assert engine.get_lr() == [0.5, 0.25]
    assert [engine._core.hyperparameters(group)["max_coeff"] for group in (0, 1)] == [1.0, 10.0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: FusedAdam(p, amsgrad=True), r"FusedAdam: amsgrad=True is not supported; take torch.optim.AdamW"),
        (lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False), "fp32_optimizer_states=False is not supported"),
        (lambda p: FusedLamb(p, max_grad_norm=1.0), 'max_grad_norm=1.0 is not supported; set "gradient_clipping"'),
    ],
)
def test_an_option_is_refused_if(make, text):
    with pytest.raises(deeptide.ConfigError, match=text):
        make(models.make_model().parameters())


def test_a_class_does_not_step_by_itself():
    with pytest.raises(RuntimeError, match=r"FusedLion.step\(\): give the optimizer to initialize, whose engine steps"):
        FusedLion(models.make_model().parameters()).step()
