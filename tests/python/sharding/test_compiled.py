# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""torch.compile at every stage: what it computes, how much is whole meanwhile, and that nothing is compiled twice.

torch's compiler is one for all threads of a process, so ranks are processes here. Most tests compile to torch's own
operators (aot_eager), which is quick and must give the same bits; inductor's kernels take seconds a graph.
"""

import models
import pytest
import torch
from conftest import run_processes
from torch.utils.checkpoint import checkpoint

import deeptide

UNITS = 5  # embedding (tied to the head), three blocks, the last norm


class Checkpointed(models.TinyModel):
    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


KINDS = {"plain": models.TinyModel, "checkpointed": Checkpointed}


def begin():
    deeptide.init_distributed()
    torch.set_num_threads(1)


def compiled_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def trained(stage, compiling=None, when="after", kind="plain", bf16=False, steps=3):
    """Losses of two micro-batches a step and one evaluation, the state, and the most bytes that were gathered.

    compiling: what torch.compile takes. After the first step nothing is compiled any more.
    """
    model = models.make_model(kind=KINDS[kind])
    if compiling and when == "before":
        model.compile(**compiling)
    if compiling and when == "wrapped":
        model = torch.compile(model, **compiling)
    settings = models.config(stage, gas=2, bf16=bf16, zero={"stage3_max_live_parameters": 1})
    engine, *_ = deeptide.initialize(model=model, config=settings)
    if compiling and when == "after":
        engine.compile(compile_kwargs=compiling)
    if compiling and when == "blocks":
        for block in engine.module.h:
            block.compile(**compiling)
    losses = []
    for step in range(steps):
        for tokens, targets in models.batches(2, 2, seed=step):
            loss = engine(tokens, targets)
            engine.backward(loss)
            outcome = engine.step()
            losses.append(loss.detach())
        assert outcome.applied
        if step == 0:
            compiled = compiled_graphs()
        assert compiled_graphs() == compiled, "compiled again"
    with torch.no_grad():
        losses.append(engine(tokens, targets))
    state = {name.removeprefix("_orig_mod."): value for name, value in engine.module_state_dict().items()}
    result = torch.stack(losses), state, engine._core.peak_gathered_bytes()
    engine.destroy()
    return result


def to_the_same_bits(stage, when, kind, bf16):
    begin()
    losses, state, gathered = trained(stage, kind=kind, bf16=bf16)
    before = compiled_graphs()
    found, found_state, found_gathered = trained(stage, {"backend": "aot_eager"}, when, kind, bf16)
    assert compiled_graphs() > before  # else this compares nothing
    assert torch.equal(found, losses)
    models.assert_same(found_state, state)
    assert found_gathered == gathered
    assert (gathered > 0) == (stage == 3)


@pytest.mark.apart
@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("when", ["before", "wrapped", "after", "blocks"])
@pytest.mark.parametrize("kind", ["plain", "checkpointed"])
@pytest.mark.parametrize("bf16", [False, True])
def test_compiled_model_trains_to_the_same_bits(stage, when, kind, bf16):
    run_processes(2, to_the_same_bits, stage, when, kind, bf16, timeout=300)


# -- graphs in pieces, and kernels that read memory ----------------------------------------------------------------


def reading_addresses():
    """A backend as inductor is to us, but quick: it reads its inputs' memory, and is compiled piece by piece."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    from deeptide import _C
    from deeptide._model import compiled

    pieces = []

    def by_address(graph, inputs):
        def kernels(inputs):
            for tensor in inputs:
                if isinstance(tensor, torch.Tensor):
                    assert tensor.numel() == 0 or tensor.data_ptr() != 0
            return graph(*inputs)

        def run(inputs):
            return _C.run_as_operator(kernels, inputs, set())

        run._boxed_call = True
        assert make_boxed_func(run) is not run
        return run

    aot = aot_autograd(fw_compiler=by_address)

    def compile_piece(graph, inputs):
        pieces.append(graph)
        return aot(graph, inputs)

    return (lambda graph, inputs: compiled.compile_by_units(graph, inputs, compile_piece)), pieces


def in_pieces(kind):
    begin()
    losses, state, gathered = trained(3, kind=kind)
    backend, pieces = reading_addresses()
    found, found_state, found_gathered = trained(3, {"backend": backend}, kind=kind)
    assert torch.equal(found, losses)
    models.assert_same(found_state, state)
    assert found_gathered == gathered
    # One graph each for training and evaluation; the tied embedding comes in again at the end, with the norm's unit.
    assert len(pieces) == 2 * (UNITS + 1), [str(piece.graph) for piece in pieces]


@pytest.mark.costly
@pytest.mark.apart
@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "checkpointed"])
def test_graph_is_cut_where_a_unit_comes_in(kind):
    run_processes(2, in_pieces, kind, timeout=300)


# -- inductor ------------------------------------------------------------------------------------------------------


def close(one, other, bf16):
    """Inductor fuses, and sums in another order than torch's operators."""
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if bf16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(one.float(), other.float(), **tolerance)


def by_inductor(world, when, kind, bf16):
    begin()
    losses, state, gathered = trained(3, kind=kind, bf16=bf16)
    found, found_state, found_gathered = trained(3, {"backend": "inductor"}, when, kind, bf16)
    close(found, losses, bf16)
    for name, value in state.items():
        close(found_state[name], value, bf16)
    assert found_gathered == gathered
    assert (gathered > 0) == (world > 1)


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "when", "kind", "bf16"),
    [(1, "before", "plain", False), (2, "after", "plain", False), (2, "after", "checkpointed", True)],
)
def test_inductor_trains_as_torch_does(kernels, world, when, kind, bf16):
    run_processes(world, by_inductor, world, when, kind, bf16, timeout=600)


def shapes_and_writes():
    begin()
    engine, *_ = deeptide.initialize(model=models.make_model(layers=1), config=models.config(3))
    plain = models.make_model(layers=1)
    compiled = torch.compile(engine.module, backend="inductor", dynamic=True)
    for length in (6, 9, 4):
        tokens, targets = models.batches(1, 2, length=length)[0]
        torch.testing.assert_close(compiled(tokens, targets), plain(tokens, targets))
    known = compiled_graphs()
    compiled(*models.batches(1, 2, length=7)[0])
    assert compiled_graphs() == known, "compiled again for another length"

    @torch.compile(backend="inductor")
    def halve(weight, other, of_another_unit):
        weight.mul_(0.5)
        of_another_unit.mul_(0.5)
        return (weight + other).sum()

    with torch.no_grad():
        up, down, norm = engine.module.h[0].up.weight, engine.module.h[0].down.bias, engine.module.norm.weight
        expected = models.make_model(layers=1).h[0].up.weight / 2
        torch.testing.assert_close(halve(up, down[:1], norm), (expected + down[:1]).sum())
        engine.empty_partition_cache()
        assert torch.equal(up, expected)
        assert torch.equal(norm, torch.full_like(norm, 0.5))
    with pytest.raises(RuntimeError, match=r"'h\.0\.up\.weight' was accessed directly while it is sharded"):
        up.data_ptr()
    engine.destroy()


@pytest.mark.apart
@pytest.mark.slow
def test_inductor_follows_other_shapes_and_writes(kernels):
    run_processes(2, shapes_and_writes, timeout=600)


def while_values_are_on_their_way():
    begin()
    own = {"overlap_publish": True}
    engine, *_ = deeptide.initialize(model=models.make_model(layers=1), config=models.config(1, deeptide=own))
    tokens, targets = models.batches(1, 2)[0]
    compiled = torch.compile(engine.module, backend="inductor")
    for _ in range(3):
        loss = compiled(tokens, targets)
        torch.testing.assert_close(loss, engine.module(tokens, targets))
        engine.backward(loss)
        assert engine.step().applied
    engine.destroy()


@pytest.mark.apart
@pytest.mark.slow
def test_inductor_waits_for_values_on_their_way(kernels):
    run_processes(2, while_values_are_on_their_way, timeout=600)


def without_cuda_graphs():
    from deeptide._model import compiled

    for mode, expected in (("reduce-overhead", False), ("default", None)):
        asked = torch._TorchCompileInductorWrapper(mode, None, None)
        found = compiled._without_cuda_graphs(asked)
        assert found.config.get("triton.cudagraphs") == expected
        assert (found is asked) == (mode == "default") and found.config == {**asked.config, **found.config}
    assert torch._TorchCompileInductorWrapper("reduce-overhead", None, None).config["triton.cudagraphs"] is True


def test_cuda_graphs_are_left_out_where_parameters_are_sharded():
    run_processes(1, without_cuda_graphs)
