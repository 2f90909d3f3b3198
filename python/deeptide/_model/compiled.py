# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""torch.compile on parameters that are sharded: inductor's kernels read memory by address, past the dispatcher.

To the gate, a graph that inductor compiled is one operator: its parameters are whole while it runs, in forward and in
backward. A graph that uses several units is cut where another unit comes in, and each piece is compiled by itself, so
that no more is whole than without the compiler. Other backends run torch's operators, which the gate sees anyway.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from deeptide import _C
from deeptide._process.log import say

if TYPE_CHECKING:
    from deeptide.engine import Engine

_Backend = Callable[[fx.GraphModule, list[Any]], Any]

_installed = False


def compile_model(engine: Engine, backend: Any = None, compile_kwargs: dict[str, Any] | None = None) -> None:
    """Has torch.compile work on the model, in place, at any stage. `compile_kwargs`: what torch.compile takes.

    Where the first step measures activations, the model is compiled after that.
    """
    policy = engine._activations
    if policy is not None and policy.after_choice(functools.partial(compile_model, engine, backend, compile_kwargs)):
        return
    options = dict(compile_kwargs or {})
    if backend is not None:
        options["backend"] = backend
    for module in engine._modules_to_compile():
        module.compile(**options)
    engine.is_compiled = True


def install() -> None:
    """Has inductor compile graphs with sharded parameters for us, once; other graphs take torch's own way."""
    global _installed
    if _installed:
        return
    _installed = True
    wrapper: Any = torch._TorchCompileInductorWrapper
    compile_whole = wrapper.__call__

    @functools.wraps(compile_whole)
    def compile_graph(self: Any, graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        _serve_compiled_graphs()
        if any(_units_of_inputs(graph).values()):
            self = _without_cuda_graphs(self)
        return compile_by_units(graph, inputs, functools.partial(compile_whole, self, **options))

    wrapper.__call__ = compile_graph


@functools.cache
def _serve_compiled_graphs() -> None:
    """Makes each call of a compiled graph one operator to the gate. Not at import: inductor takes long to load."""
    from torch._inductor.output_code import CompiledFxGraph

    graphs: Any = CompiledFxGraph
    run = graphs.__call__

    @functools.wraps(run)
    def run_as_operator(self: Any, inputs: list[Any]) -> Any:
        return _C.run_as_operator(functools.partial(run, self), inputs, list(self.mutated_input_idxs))

    graphs.__call__ = run_as_operator


def _without_cuda_graphs(wrapper: Any) -> Any:
    """CUDA graphs replay kernels at the addresses of their first run, and a gathered unit has another each time."""
    from torch._inductor import config

    if not wrapper.config.get("triton.cudagraphs", config.triton.cudagraphs):
        return wrapper
    if torch.cuda.is_available():
        _say_once("torch.compile: CUDA graphs are left out where parameters are sharded (ZeRO stage 3)")
    wrapper = copy.copy(wrapper)
    wrapper.config = {**wrapper.config, "triton.cudagraphs": False}
    return wrapper


@functools.cache
def _say_once(text: str) -> None:
    say(text, "warning")


def _units_of_inputs(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """{an input of dynamo's graph: the unit of the sharded parameter that it stands for, or 0}."""
    units = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        example = None if argument is None else argument.example
        units[node] = _C.sharded_unit(example) if isinstance(example, torch.Tensor) else 0
    return units


def _pieces_of(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """{an operator of the graph: its piece}; pieces are consecutive, and each begins where another unit comes in."""
    units = _units_of_inputs(graph)
    pieces: dict[fx.Node, int] = {}
    piece = 0
    whole: set[int] = set()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        wanted = {units[source] for source in node.all_input_nodes if units.get(source)}
        if whole and not wanted <= whole:
            piece += 1
            whole = set()
        whole |= wanted
        pieces[node] = piece
    return pieces


def compile_by_units(graph: fx.GraphModule, inputs: list[Any], backend: _Backend) -> Any:
    """Compiles dynamo's graph with `backend`, piece by piece where it uses several units. Returns a callable."""
    pieces = _pieces_of(graph)
    if len(set(pieces.values())) < 2:
        return backend(graph, inputs)
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing, detect_fake_mode
    from torch.fx.passes.split_module import split_module

    cut = split_module(graph, graph, pieces.__getitem__, keep_original_order=True)
    _describe_pieces(cut, graph)
    with _disable_saved_tensors_hooks_during_tracing():
        _piece_compiler(cut, backend, detect_fake_mode(inputs)).run(*inputs)
    cut.recompile()
    return cut


def _describe_pieces(cut: Any, graph: Any) -> None:
    """Gives the pieces what dynamo noted of the whole graph, for backends and guards."""
    sources = {node.name: node._dynamo_source for node in graph.graph.find_nodes(op="placeholder")}
    for call in cut.graph.find_nodes(op="call_module"):
        piece = cut.get_submodule(call.target)
        piece.meta = graph.meta
        piece._param_name_to_source = graph._param_name_to_source
        for node in piece.graph.find_nodes(op="placeholder"):
            node._dynamo_source = sources.get(node.name)


def _piece_compiler(cut: fx.GraphModule, backend: _Backend, fake_mode: Any) -> fx.Interpreter:
    """Returns the class by which torch compiles the pieces of a DDP model, with a context of its own for each piece.

    Backward graphs are compiled when they first run. torch counts them down from the last piece in one context for all,
    and would take another piece's description where a piece needs no backward.
    """
    from torch._dynamo.backends.distributed import SubmodCompiler
    from torch._guards import TracingContext, tracing

    class PieceCompiler(SubmodCompiler):
        def run_node(self, n: fx.Node) -> Any:
            context: Any = copy.copy(TracingContext.get())
            context.ddp_optimizer_ctx = type(context.ddp_optimizer_ctx)()
            with tracing(context):
                return super().run_node(n)

    return PieceCompiler(cut, backend, fake_mode)
