# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Code that bypasses the operators works, or throws a text with the parameter's name and the cure; nothing crashes."""

import copy
import ctypes
import io
import pickle
import sys

import models
import numpy
import pytest
import torch
from conftest import run_processes
from gated import engine_of

import deeptide

pytestmark = pytest.mark.apart

TOKENS, TARGETS = models.batches(1, 2)[0]
NAME = "h.1.up.weight"


def read_by_address(p):
    return ctypes.string_at(p.data_ptr(), 4)


def save_to_memory(p):
    torch.save(p, io.BytesIO())


def save_in_dict(p):
    torch.save({"weight": p}, io.BytesIO())


def write_by_numpy(p):
    p.detach().numpy()[:] = 0


# Ways to the memory that no operator sees.
RAW = {
    "data_ptr": read_by_address,
    "data_ptr of a view": lambda p: read_by_address(p.detach()[1:]),
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "numpy with force": lambda p: p.numpy(force=True),
    "numpy of a view": lambda p: p.detach().t()[2:].numpy(),
    "numpy asarray": lambda p: numpy.asarray(p.detach()),
    "write by numpy": write_by_numpy,
    "torch.save": save_to_memory,
    "torch.save of a dict": save_in_dict,
    "pickle": pickle.dumps,
    "storage data_ptr": lambda p: p.untyped_storage().data_ptr(),
    "storage clone": lambda p: p.untyped_storage().clone(),
    "storage tolist": lambda p: p.untyped_storage().tolist(),
    "storage item": lambda p: p.untyped_storage()[0],
    "storage copy": lambda p: p.untyped_storage().copy_(torch.zeros_like(p).untyped_storage()),
    "storage fill": lambda p: p.untyped_storage().fill_(0),
    "typed storage": lambda p: p.detach().storage().tolist(),
    "dlpack": lambda p: torch.utils.dlpack.from_dlpack(p.detach()),
    "numpy dlpack": lambda p: numpy.from_dlpack(p.detach()),
    "share_memory": lambda p: p.share_memory_(),
    "storage deepcopy": lambda p: copy.deepcopy(p.untyped_storage()),
    "storage resize": lambda p: p.untyped_storage().resize_(1 << 16),
    "mutable by from_buffer": lambda p: torch.frombuffer(memoryview(p.detach().numpy()), dtype=torch.float32),
}
# The end of the text.
ALIVE = "engine.module_state_dict.*parameter.clone"
DESTROYED = "after its engine was destroyed.*engine.save_checkpoint"


def attempt(access, parameter, cure):
    """None when the access worked, else its error, which must be ours."""
    try:
        access(parameter)
    except Exception as error:
        text = str(error)
        assert NAME in text, f"{type(error).__name__}: {text}"
        with pytest.raises(type(error), match=f"(?s){cure}"):
            raise
        return text
    return None


def try_all():
    """Every raw access in turn, in a process of its own: an access that crashed would end it."""
    deeptide.init_distributed()
    with engine_of(None, models.TinyModel) as engine:
        model = engine.module
        parameter = dict(model.named_parameters())[NAME]
        worked = []
        for when in ("before training", "after a step"):
            for name, access in RAW.items():
                print(when, name, file=sys.stderr, flush=True)
                if attempt(access, parameter, ALIVE) is None:
                    worked.append(name)
            model(TOKENS, TARGETS).backward()
            assert engine.step().applied
        assert torch.isfinite(parameter).all()
    print("destroyed", file=sys.stderr, flush=True)
    for name, access in {**RAW, "an operator": torch.sum, "a forward": lambda p: model(TOKENS, TARGETS)}.items():
        print("destroyed", name, file=sys.stderr, flush=True)
        if name == "a forward":
            with pytest.raises(RuntimeError, match=f"(?s)parameter '.*{DESTROYED}"):
                access(parameter)
        elif attempt(access, parameter, DESTROYED) is None:
            worked.append(name)
    print("worked:", ", ".join(sorted(set(worked))))


def test_raw_access_throws_our_text_and_never_crashes():
    for done in run_processes(2, try_all):
        worked = done.stdout.split("worked:")[1].strip()
        assert worked == "", worked
