# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Finds a model's blocks, and the stage of each parameter of the uncut model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from deeptide._C import ConfigError
from deeptide.pipeline.cutting.order import runs_before
from deeptide.pipeline.partition import balanced

_SHARE = 0.25  # of the trained elements: so much in two containers means two chains of blocks
_LEAST = 0.05  # so much in each of an encoder and a decoder means that both are to be cut
_HEADS = ("classifier", "score", "qa_outputs", "pooler")  # run after the blocks, wherever they lie
_CURE = 'give "cut": "by_operator", or write the model as a deeptide.pipeline.PipelineModule'


class Blocks(NamedTuple):
    """A numbered container of blocks: its path in the model, and the blocks in order."""

    path: str
    container: torch.nn.Module
    blocks: list[torch.nn.Module]

    def trained(self) -> int:
        """Elements of parameters that require a gradient."""
        return num_trained(self.container)

    def holds(self, path: str) -> bool:
        """Whether a module lies inside."""
        return self.path == "" or path.startswith(self.path + ".")


class Chain(NamedTuple):
    """Containers of blocks that run one after the other: one, or an encoder's and a decoder's."""

    parts: list[Blocks]

    @property
    def carries(self) -> bool:
        """Whether blocks are known to be called with more than the one before returns."""
        return len(self.parts) > 1

    @property
    def cure(self) -> str:
        """For a model that is none."""
        return 'give "cut": "by_operator", or write it as a deeptide.pipeline.PipelineModule'

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """All blocks, in order."""
        return [block for part in self.parts for block in part.blocks]

    @property
    def names(self) -> list[str]:
        """The blocks' paths in the model."""
        return [
            f"{part.path}.{number}" if part.path else str(number)
            for part in self.parts
            for number in range(len(part.blocks))
        ]

    @property
    def modules(self) -> set[int]:
        """The ids of the blocks and of all modules within."""
        return {id(module) for block in self.blocks for module in block.modules()}

    def lies_in(self, path: str) -> bool:
        """Whether the module of that path has any of the blocks inside."""
        return any(not path or name.startswith(path + ".") for name in self.names)

    @property
    def path(self) -> str:
        """The containers' paths, for errors."""
        return " and ".join(part.path for part in self.parts)


def num_trained(module: torch.nn.Module) -> int:
    """Elements of a module's parameters that require a gradient."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _containers(model: torch.nn.Module) -> Iterator[Blocks]:
    for path, module in model.named_modules():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            yield Blocks(path, module, list(module))


def _outermost(found: list[Blocks]) -> list[Blocks]:
    """Without those that lie inside another one."""
    paths = [blocks.path for blocks in found]
    return [b for b in found if not any(p != b.path and (p == "" or b.path.startswith(p + ".")) for p in paths)]


def _are_alike(blocks: list[torch.nn.Module]) -> bool:
    return len({type(block) for block in blocks}) == 1 and any(True for _ in blocks[0].parameters())


def _declared(model: torch.nn.Module, found: list[Blocks]) -> list[Blocks]:
    """Containers that a configuration of Transformers names in base_model_pp_plan."""
    named = []
    for path, module in model.named_modules():
        plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None) or {}
        named += [f"{path}.{key}" if path else key for key in plan]
    return [blocks for blocks in found if blocks.path in named]


def _long_enough(model: torch.nn.Module, num_parts: int) -> list[Blocks]:
    """The containers that may be cut, the best kind alone: declared, of one class, of several classes."""
    found = [blocks for blocks in _containers(model) if len(blocks.blocks) >= num_parts]
    alike = [blocks for blocks in found if _are_alike(blocks.blocks)]
    for kind in (_declared(model, alike), alike, found):
        if kind:
            return _outermost(kind)
    return []


def _decoder_of(encoder: Blocks, alike: list[Blocks]) -> Blocks | None:
    """The decoder beside an encoder, by the names on their paths."""
    path = encoder.path.split(".")
    at = next((at for at, name in enumerate(path) if "encoder" in name.split("_")), None)
    if at is None:
        return None
    sought = ".".join([*path[:at], path[at].replace("encoder", "decoder"), *path[at + 1 :]])
    return next((blocks for blocks in alike if blocks.path == sought), None)


def _encoder_and_decoder(model: torch.nn.Module, num_parts: int) -> Chain | None:
    """A model's encoder and decoder, where both have a good part of its weights: they run one after the other."""
    alike = _outermost([blocks for blocks in _containers(model) if blocks.blocks and _are_alike(blocks.blocks)])
    most = num_trained(model)
    for encoder in alike:
        decoder = _decoder_of(encoder, alike)
        if decoder is None or min(encoder.trained(), decoder.trained()) <= _LEAST * most:
            continue
        if len(encoder.blocks) + len(decoder.blocks) >= num_parts:
            return Chain([encoder, decoder])
    return None


def numbered_blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The blocks of all of a model's chains by their paths: of an encoder's and a decoder's, and of towers beside."""
    return {
        f"{found.path}.{key}" if found.path else key: block
        for found in _long_enough(model, 2)
        for key, block in found.container.named_children()  # a shared one once
    }


def find_blocks(model: torch.nn.Module, num_stages: int, num_chunks: int = 1) -> Chain:
    """The chain of blocks that a model is cut along. Errors: ConfigError if it has none, or several."""
    asked = f"parallel.pipeline is {num_stages}" + (f" with {num_chunks} chunks" if num_chunks > 1 else "")
    num_parts = num_stages * num_chunks
    chain = _encoder_and_decoder(model, num_parts) or Chain([_longest(model, num_parts, asked)])
    blocks = chain.blocks
    if len(set(map(id, blocks))) < len(blocks):
        raise ConfigError(
            f"{asked}, and {chain.path or type(model).__name__} holds one module twice, which would be on two stages: "
            f"{_CURE}"
        )
    return chain


def _longest(model: torch.nn.Module, num_parts: int, asked: str) -> Blocks:
    found = sorted(_long_enough(model, num_parts), key=Blocks.trained, reverse=True)
    name = type(model).__name__
    if not found:
        raise ConfigError(
            f"{asked}, and {name} has no ModuleList or Sequential of {num_parts} blocks or more to be cut along; take "
            f"fewer stages, or {_CURE}"
        )
    most = num_trained(model)
    rivals = [blocks.path for blocks in found if blocks.trained() > _SHARE * most]
    if len(rivals) > 1:
        raise ConfigError(
            f"{asked}, and {name} has more than one chain of blocks: {', '.join(rivals)}; only one can be cut: {_CURE}"
        )
    return found[0]


def _bounds_at(chain: Chain, num_parts: int, starts: list[str]) -> list[int]:
    """Bounds of parts that begin with these blocks. Errors: ConfigError."""
    names, subject = chain.names, f"parallel.pipeline.cut is {starts}"
    for name in starts:
        if name not in names:
            known = ", ".join(names if len(names) <= 4 else [*names[:2], "…", names[-1]])
            raise ConfigError(f"{subject}, and '{name}' is none of the model's blocks, which are {known}")
    if len(starts) != num_parts - 1:
        raise ConfigError(
            f"{subject}: got {len(starts)} names for {num_parts} parts of the blocks, expected {num_parts - 1}, of the "
            "first block of each part but the first"
        )
    bounds = [0, *map(names.index, starts), len(names)]
    for before, after in itertools.pairwise(bounds):
        if after <= before:
            raise ConfigError(
                f"{subject}: '{names[after]}' begins no later than the part before it, which begins with "
                f"'{names[before]}'; give names in the blocks' order, without the first block"
            )
    return bounds


def bounds_of_blocks(
    model: torch.nn.Module, chain: Chain, num_parts: int, starts: list[str] | None = None
) -> list[int]:
    """Bounds of the parts' blocks, by trained parameters: what follows the blocks counts with the last one.

    A part is a stage, or a chunk of one: chunk 0 of each stage, chunk 1 of each, and so on.
    starts: names of the first block of each part but the first. Errors: ConfigError if they are no such names.
    """
    if starts is not None:
        return _bounds_at(chain, num_parts, starts)
    weights = [float(sum(parameter.numel() for parameter in block.parameters())) for block in chain.blocks]
    places = Places(chain, [0] * len(weights))
    after = {
        id(parameter): parameter.numel()
        for path, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if places.side(path, model, chain.parts[-1]) == "after"
    }
    weights[-1] += sum(after.values())
    return balanced(weights, num_parts)


class Places:
    """The parts of modules, by their paths. `parts`: of each block."""

    def __init__(self, chain: Chain, parts: list[int]) -> None:
        self._chain, self._parts = chain, parts
        self._heads: list[str] | None = None  # paths of the output embeddings

    def side(self, path: str, model: torch.nn.Module, part: Blocks) -> str:
        """The place of a module: "before" or "after" the blocks, as the code around both has it, "block" or "around".

        A head that the model names is after them.
        """
        chain = part.path
        if path == chain or path == "" or chain.startswith(path + "."):
            return "around"
        if part.holds(path):
            return "block"
        own, other = path.split("."), chain.split(".")
        common = next(i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
        branch = ".".join(own[: common + 1])
        if own[common] in _HEADS or any(
            head == branch or head.startswith(branch + ".") for head in self._heads_of(model)
        ):
            return "after"
        parent = model.get_submodule(".".join(own[:common]))
        return "before" if runs_before(parent, own[common], other[common]) else "after"

    def _heads_of(self, model: torch.nn.Module) -> list[str]:
        if self._heads is None:
            head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
            own = head if isinstance(head, torch.nn.Linear) else None
            self._heads = [path for path, module in model.named_modules() if module is own]
        return self._heads

    def parts_of(self, path: str, model: torch.nn.Module) -> list[int]:
        """The parts that use a module's own parameters: those of modules around the blocks may be used anywhere.

        What lies between an encoder's blocks and a decoder's runs where the encoder's last block does.
        """
        at, first = 0, 0
        for blocks in self._chain.parts:
            side = self.side(path, model, blocks)
            if side == "around":
                return list(range(self._parts[-1] + 1))
            if side == "block":
                number = path[len(blocks.path) + 1 if blocks.path else 0 :].split(".")[0]
                keys = [name for name, _ in blocks.container.named_children()]
                return [self._parts[first + keys.index(number)]]
            first += len(blocks.blocks)
            at = self._parts[first - 1] if side == "after" else at
        return [at]


def parts_of_blocks(bounds: list[int]) -> list[int]:
    """The part of each block."""
    return [part for part, (begin, end) in enumerate(itertools.pairwise(bounds)) for _ in range(end - begin)]


def uses_of_modules(model: torch.nn.Module, chain: Chain, parts: list[int]) -> dict[int, list[int]]:
    """The parts that use a module, by its id, over all of its paths."""
    places, uses = Places(chain, parts), dict[int, set[int]]()
    for path, module in model.named_modules(remove_duplicate=False):
        uses.setdefault(id(module), set()).update(places.parts_of(path, model))
    return {key: sorted(found) for key, found in uses.items()}


def stages_of(uses: dict[int, list[int]], num_stages: int) -> dict[int, list[int]]:
    """The same by stage."""
    return {key: sorted({part % num_stages for part in parts}) for key, parts in uses.items()}


def uses_of_parameters(model: torch.nn.Module, uses: dict[int, list[int]]) -> dict[int, list[int]]:
    """The stages that use a parameter, by its id; the first owns it. `uses`: of the modules."""
    stages: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            stages.setdefault(id(parameter), set()).update(uses[id(module)])
    return {key: sorted(found) for key, found in stages.items()}
