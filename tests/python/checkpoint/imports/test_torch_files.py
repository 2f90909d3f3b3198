# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The reader of torch's files beside torch.load(weights_only=True): random values, and pickles that would run code."""

import argparse
import collections
import json
import pickle
import random

import numpy
import pytest
import torch

import deeptide
from deeptide import _C
from deeptide._engine import checkpoint as _checkpoint


def read(path):
    """Reads a file by the core, as Python's values again."""
    described = json.loads(_C.describe_torch_file(str(path)))
    assert described["left_out"] == []
    return _checkpoint._restore_notes(described["values"], described["notes"])["root"]


def random_scalar(rng):
    return rng.choice(
        [
            None,
            rng.random() < 0.5,
            rng.randrange(-(2**62), 2**62),
            rng.randrange(-300, 70_000),
            rng.uniform(-1e30, 1e30),
            "".join(rng.choice("aé→𝄞 \n\0") for _ in range(rng.randrange(9))),
        ]
    )


def random_tensor(rng):
    dtype = rng.choice(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    )
    shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
    return torch.randint(0, 100, shape).to(dtype)


def random_value(rng, depth):
    kind = rng.randrange(9 if depth > 0 else 3)
    if kind < 3:
        return random_scalar(rng)
    if kind == 3:
        return random_tensor(rng)
    items = [random_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 4:
        return items
    if kind == 5:
        return tuple(items)
    if kind == 6:
        return {rng.randrange(-5, 100): item for item in items}
    keys = [f"k{rng.randrange(10)}" for _ in items]
    pairs = dict(zip(keys, items, strict=True))
    return collections.OrderedDict(pairs) if kind == 7 else pairs


def check_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected) or sorted(map(str, found)) == sorted(map(str, expected))
        for key, value in expected.items():
            check_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_random_values_are_what_torch_load_reads(tmp_path, protocol):
    rng = random.Random(protocol)
    torch.manual_seed(protocol)
    for _ in range(60):
        value = random_value(rng, 4)
        path = tmp_path / "values.pt"
        torch.save(value, path, pickle_protocol=protocol)
        # Protocols above 2 are more than weights_only takes.
        check_same(read(path), torch.load(path, weights_only=protocol == 2))


@pytest.mark.parametrize("protocol", [2, 4])
def test_numpy_and_namespaces_are_values_and_records(tmp_path, protocol):
    path = tmp_path / "values.pt"
    value = {
        "scalar": numpy.float32(0.1),
        "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
        "namespace": argparse.Namespace(lr=0.5, betas=(0.9, 0.99)),
        "nan": float("nan"),
        "big": 2**70,
        "shape": torch.Size([2, 3]),
        "set": {3},
        "bytes": b"\x00\xff",
    }
    torch.save(value, path, pickle_protocol=protocol)
    found = read(path)
    assert found["scalar"] == pytest.approx(0.1, rel=1e-7)
    assert found["array"].dtype == numpy.int16
    assert (found["array"] == value["array"]).all()
    assert found["namespace"] == {"__class__": "argparse.Namespace", "state": {"lr": 0.5, "betas": (0.9, 0.99)}}
    assert found["nan"] == {"__class__": "float", "value": "nan"}
    assert int(found["big"]["value"], 16) == 2**70
    assert found["shape"] == {"__class__": "torch.Size", "arguments": [(2, 3)]}
    assert found["bytes"] == {"__class__": "bytes", "hex": "00ff"}


class Runs:
    """Python would run its reduction's function."""

    def __init__(self, function, *arguments):
        self.reduction = (function, arguments)

    def __reduce__(self):
        return self.reduction


def test_nothing_in_a_file_runs(tmp_path):
    marker = tmp_path / "ran"
    path = tmp_path / "hostile.bin"
    torch.save({"w": torch.ones(2), "x": Runs(exec, f"open({str(marker)!r}, 'w')"), "y": Runs(eval, "1/0")}, path)
    found = read(path)
    module = pickle.whichmodule(exec, "exec")
    if module == "builtins":
        assert found["x"]["__class__"] in ("builtins.exec", "__builtin__.exec")
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2))})
    assert deeptide.load_weights(model, path) == ([], [])
    assert model["w"].tolist() == [1.0, 1.0]
    assert not marker.exists()


def test_values_that_hold_themselves_are_told(tmp_path):
    circle, wide = [], "x" * 100
    circle.append(circle)
    for _ in range(30):
        wide = [wide, wide]
    for value in (circle, wide):
        torch.save(value, tmp_path / "values.pt")
        (line,) = json.loads(_C.describe_torch_file(str(tmp_path / "values.pt")))["left_out"]
        assert "it holds itself" in line or "too many values" in line


def test_files_that_are_cut_or_old_are_refused(tmp_path):
    path = tmp_path / "weights.bin"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(deeptide.CheckpointError, match="load it with torch and save it again"):
        deeptide.load_weights(torch.nn.Linear(1, 1), path)
    torch.save({"w": torch.ones(300)}, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(deeptide.CheckpointError, match=r"weights\.bin"):
            _C.describe_torch_file(str(path))
