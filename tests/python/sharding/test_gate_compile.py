# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The gate under tools that trace: their programs hold the user's operators and none of ours, and stay right.

torch's tracers are one for all threads of a process, so ranks are processes here.
"""

import os

import models
import pytest
import torch
import torch.distributed as dist
from conftest import run_processes
from gated import assert_same_gradients, engine_of, gradients_of, inputs, on_plain
from torch.fx.experimental.proxy_tensor import make_fx

import deeptide

pytestmark = pytest.mark.apart

TOKENS, TARGETS = models.batches(1, 2)[0]


def start():
    deeptide.init_distributed()
    torch.set_num_threads(1)
    return engine_of(None, models.TinyModel)


def outcome(model):
    return model(TOKENS, TARGETS)


def compiled(backend):
    loss, gradients = on_plain(models.TinyModel, outcome)
    with start() as engine:
        model = torch.compile(engine.module, backend=backend)
        found = model(TOKENS, TARGETS)
        found.backward()
        assert torch.equal(found, loss)
        assert_same_gradients(gradients_of(engine), gradients)
        assert engine.step().applied
        assert torch.equal(model(TOKENS, TARGETS), engine.module(TOKENS, TARGETS))


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_trains_to_the_same_bits(backend):
    run_processes(2, compiled, backend)


def exported():
    loss, _ = on_plain(models.TinyModel, outcome)
    with start() as engine:
        program = torch.export.export(engine.module, (TOKENS, TARGETS))
        assert torch.equal(program.module()(TOKENS, TARGETS), loss)
        assert engine._core.peak_gathered_bytes() > 0
        names = {str(node.target) for node in program.graph.nodes}
        assert not any("as_strided" in name or "c10d" in name for name in names), names


@pytest.mark.costly
def test_exported_program_computes_the_same():
    run_processes(2, exported)


def traced(way):
    block = models.make_model().h[0]
    x = inputs(3, 20)
    with start() as engine:
        sharded = engine.module.h[0]
        trace = {
            "fx": lambda: torch.fx.symbolic_trace(sharded),
            "make_fx": lambda: make_fx(lambda x: sharded(x))(x),
            "jit.trace": lambda: torch.jit.trace(sharded, x),
            "jit.script": lambda: torch.jit.script(sharded.up),
        }[way]()
        expected = block.up(x) if way == "jit.script" else block(x)
        assert torch.equal(trace(x), expected)
        # Tracing has left the parameters as they were.
        assert torch.equal(sharded(x), block(x))


@pytest.mark.parametrize("way", ["fx", "make_fx", "jit.trace", "jit.script"])
def test_traced_block_computes_the_same(way):
    run_processes(2, traced, way)


class Names(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def watched():
    def see(model):
        with Names() as mode:
            outcome(model).backward()
        return mode.seen

    # A plain backward also stores gradients; the engine takes them, so forward is compared name by name.
    plain = see(models.make_model())
    with start() as engine:
        found = see(engine.module)
        engine.step()
    forward = plain.index("aten.nll_loss_forward.default") + 1
    assert found[:forward] == plain[:forward]
    ours = ("c10d", "all_gather", "as_strided", "aten.copy_", "aten.narrow")
    assert [op for op in found if op.split(".")[1] in ours or "c10d" in op] == []


def test_dispatch_modes_see_the_users_operators_only():
    run_processes(2, watched)


def inference():
    """Buffers that inference_mode was the first to take serve training afterwards."""
    loss, gradients = on_plain(models.TinyModel, outcome)
    with start() as engine:
        with torch.inference_mode():
            assert torch.equal(outcome(engine.module), loss)
            engine.module.h[0].norm.weight.mul_(1.0)
        found = outcome(engine.module)
        found.backward()
        assert torch.equal(found, loss)
        assert_same_gradients(gradients_of(engine), gradients)
        assert engine.step().applied


def test_inference_mode_before_training():
    run_processes(2, inference)


def given_to_collectives():
    with start() as engine, torch.no_grad():
        weight = engine.module.h[0].up.weight
        for collective in (dist.all_reduce, lambda t: dist.broadcast(t, 0)):
            with pytest.raises(ValueError, match=r"'h.0.up.weight'.*collective still reads.*clone"):
                collective(weight.data)
        with pytest.raises(ValueError, match=r"'h.0.up.weight'.*clone"):
            dist.all_gather([torch.empty(weight.shape) for _ in range(2)], weight.data)
        total = weight.clone()
        dist.all_reduce(total)
        weight.copy_(total)
        assert torch.equal(engine.module.h[0].up.weight, models.make_model().h[0].up.weight * 2)


def test_collective_on_a_sharded_parameter_says_the_cure():
    run_processes(2, given_to_collectives)


def forked():
    with start() as engine:
        outcome(engine.module).backward()
        child = os.fork()
        if child == 0:
            # A data loader's worker: it holds the parameters but does not compute with them.
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert engine.step().applied


def test_fork_leaves_the_parent_whole():
    run_processes(2, forked)
