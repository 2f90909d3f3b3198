# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Values that skip blocks: outputs of modules that a later stage uses otherwise than through the chain of blocks.

The first forward of a kind tells which: an Elsewhere tensor knows the module whose output it is, or the tensors that it
was computed from. Those outputs then travel beside the chain's value, and stand where the module returns on the stages
that use them. A router's logits, hidden states of all blocks and long skips are such values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from deeptide._model.recomputation import in_backward
from deeptide.pipeline.cutting.derivatives import watch_hooks
from deeptide.pipeline.cutting.digest import digest
from deeptide.pipeline.errors import PipelineError
from deeptide.pipeline.passing.elsewhere import Elsewhere, ElsewhereError, elsewhere_in, version_of


class Skips:
    """One stage's part. A label names an output: its module, the block around it, the call within that, and a place.

    A kind of forward is open until all stages have one of it in which nothing was lacking, and again if one lacks then.
    """

    def __init__(self, model: torch.nn.Module, blocks: list[str]) -> None:
        """blocks: their paths in the model."""
        self._modules = dict(model.named_modules())
        self._blocks = set(blocks)
        self._hooks: dict[str, Any] = {}  # by path, of modules whose outputs skip blocks
        self._settled: set[Any] = set()  # kinds of forwards
        self._wanted: dict[Any, dict[str, int]] = {}  # by kind: labels, each with the last part that uses it
        self._left: dict[Any, int] = {}  # by kind: tensors of other stages in the output, which do not come
        self._lacking: dict[str, int] = {}  # the same, of what this stage had to do without in an open kind
        self._kind: Any = None
        self._part = -1
        # The forward that runs.
        self.received: dict[str, torch.Tensor] = {}
        self._marks: dict[str, Any] = {}  # of the calls that gave them, in a forward of an open kind
        self._own: dict[str, tuple[torch.Tensor, int | None]] = {}  # values that are here, with versions
        self._calls: Counter[tuple[int, str]] = Counter()
        self._block = -1
        self._has_begun = False  # what no earlier stage computes

    # -- kinds of forwards --------------------------------------------------------------------------------------------

    def is_settled(self, kind: Any) -> bool:
        """Whether all stages know what a forward of this kind needs."""
        return kind in self._settled

    def is_open(self) -> bool:
        """Whether the forward that runs is of a kind that is not settled, so what it lacks is noted and no error."""
        return self._kind not in self._settled

    def open_again(self, kind: Any) -> None:
        """Values that forwards of this kind have needed so far still come, and lacks are noted."""
        self._settled.discard(kind)

    def lacking(self) -> dict[str, int]:
        """The labels that this stage lacked since it was last asked, each with the last part that uses it."""
        lacking, self._lacking = self._lacking, {}
        return lacking

    def settle(self, kind: Any, lacking: Iterable[Mapping[str, int]]) -> bool:
        """Takes what each stage lacked. False: the forward is to be made again, with these values.

        Errors: PipelineError if one of them was sent already, and no stage had it.
        """
        wanted = self._wanted.setdefault(kind, {})
        parts: dict[str, int] = {}
        for each in lacking:
            for label, part in each.items():
                parts[label] = max(part, parts.get(label, part))
        for label, part in sorted(parts.items()):
            if wanted.get(label, -1) >= part:
                raise PipelineError(
                    f"an output of '{_path_of(label)}' is used by a later stage of the pipeline and does not come "
                    "there: its module runs otherwise on the stages, or its output is written in place; write the "
                    "model as a deeptide.pipeline.PipelineModule"
                )
            wanted[label] = part
            self._hook(_path_of(label))
        if not parts:
            self._settled.add(kind)
        return not parts

    def _hook(self, path: str) -> None:
        """Looks at a module from now on. A block is looked at by the passage, unless others do so by hooks."""
        module = self._modules[path]
        if path not in self._hooks and (path not in self._blocks or module._forward_hooks):
            self._hooks[path] = module.register_forward_hook(self._hook_of(path), prepend=True, with_kwargs=True)

    def _hook_of(self, path: str) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return self.returned(path, output, (args, kwargs))

        return hook

    # -- a forward ----------------------------------------------------------------------------------------------------

    def begin(self, kind: Any, part: int, received: Any) -> list[Any]:
        """Begins a forward with what `handed_on` of the part before gave; returns hooks to be removed at its end."""
        self._kind, self._part = kind, part
        self.received, self._marks = received
        self._own = {label: (value, version_of(value)) for label, value in self.received.items()}
        self._block, self._has_begun = -1, False
        self._calls.clear()
        for label, value in self.received.items():
            watch_hooks(value, _path_of(label), lambda: self._has_begun)
        if part == 0 or not self.is_open():
            return []
        return [
            module.register_forward_hook(self._hook_of(path), prepend=True, with_kwargs=True)
            for path, module in self._modules.items()
            if path and path not in self._hooks
        ]

    def end(self, hooks: list[Any]) -> None:
        """Ends it."""
        for hook in hooks:
            hook.remove()
        self._own, self.received, self._marks = {}, {}, {}

    def begin_own(self) -> None:
        """The first own block is called, or there is none. No earlier stage comes so far, so no output is of one."""
        self._has_begun = True

    def enter(self, block: int) -> None:
        """A block's call begins; -1: it has ended."""
        self._block = block

    def returned(self, path: str, output: Any, given: Any = None) -> Any:
        """A module's output, with values in the place of tensors of other stages where they came. `given`: its call.

        Errors: ElsewhereError if it was called otherwise where they were computed, which the first forward looks at.
        """
        if in_backward():
            return output
        call = 0
        if path not in self._blocks:
            call = self._calls[self._block, path]
            self._calls[self._block, path] += 1

        def seen(label: str, tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, Elsewhere):
                return self._theirs(label, tensor, given)
            return self._ours(label, tensor, given)

        return mapped(output, f"{path}#{self._block}.{call}", seen)

    def _ours(self, label: str, tensor: torch.Tensor, given: Any) -> torch.Tensor:
        if label in self._wanted.get(self._kind, ()) and label not in self.received:
            self._own[label] = tensor, version_of(tensor)
            if self.is_open() and given is not None:
                self._marks[label] = _marks_of(given)
        return tensor

    def _theirs(self, label: str, tensor: Elsewhere, given: Any) -> torch.Tensor:
        if self._has_begun:
            return tensor
        value = self.received.get(label)
        if value is not None and value.shape == tensor.shape:
            if given is not None and label in self._marks and not _are_alike(self._marks[label], _marks_of(given)):
                raise ElsewhereError(
                    f"'{_path_of(label)}' is called with other arguments than on the stage that computes it: the "
                    "stages' programs differ"
                )
            if value.requires_grad:
                torch.set_grad_enabled(True)  # in a block that is passed over, until its end
            return value
        if tensor.label is None:
            tensor.label = label
        return tensor

    def handed_on(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(values that were computed here or came, and are used by the next part or later; marks of their calls).

        Errors: ElsewhereError if a value was changed since its module returned it.
        """
        values = {}
        for label, last in self._wanted.get(self._kind, {}).items():
            if last <= self._part:
                continue
            if label not in self._own:
                continue
            tensor, version = self._own[label]
            if version_of(tensor) != version:
                raise ElsewhereError(
                    f"the output of '{_path_of(label)}' is written in place, and a later stage uses it: write into a "
                    "copy, by clone()"
                )
            values[label] = tensor
        return values, {label: mark for label, mark in self._marks.items() if label in values}

    def came(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the values that came."""
        return any(tensor is value for value in self.received.values())

    # -- what is lacking ----------------------------------------------------------------------------------------------

    def note(self, tensors: Iterable[Elsewhere]) -> Elsewhere | None:
        """Notes the outputs that these were computed from. Returns a tensor that is none, nor comes of one."""
        labels: set[str] = set()
        seen: set[int] = set()
        rest = list(tensors)
        while rest:
            tensor = rest.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if tensor.label is not None:
                labels.add(tensor.label)
            elif tensor.parents:
                rest.extend(tensor.parents)
            else:
                return tensor
        self._lacking |= dict.fromkeys(labels, self._part)
        return None

    def note_output(self, output: Any) -> bool:
        """Notes what a model's output has of other stages, as far as it can come. False: more than so far."""
        left = list(elsewhere_in(output))
        if not self.is_open():
            return len(left) <= self._left.get(self._kind, 0)
        for tensor in left:
            self.note([tensor])
        self._left[self._kind] = len(left)
        return True


def _path_of(label: str) -> str:
    return label.partition("#")[0]


def _marks_of(given: Any) -> list[int | None]:
    """Numbers of a call's shapes and plain values, and of its integers, if they are here."""
    leaves = tree_leaves(given)
    shapes = [[str(each.dtype), *each.shape] if isinstance(each, torch.Tensor) else each for each in leaves]
    is_here = not any(isinstance(each, Elsewhere) and not each.is_floating_point() for each in leaves)
    return [digest(shapes, with_floats=False), digest(leaves, with_floats=False) if is_here else None]


def _are_alike(one: list[int | None], other: list[int | None]) -> bool:
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def mapped(tree: Any, label: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The same with each tensor changed, by the keys that lead to it; the same object where none was."""
    if isinstance(tree, torch.Tensor):
        return change(label, tree)
    if isinstance(tree, dict):
        for key, item in list(tree.items()):
            made = mapped(item, f"{label}.{key}", change)
            if made is not item:
                tree[key] = made
        return tree
    if isinstance(tree, (tuple, list)):
        items = [mapped(item, f"{label}.{number}", change) for number, item in enumerate(tree)]
        if any(made is not item for made, item in zip(items, tree, strict=True)):
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def with_zeros(tree: Any) -> Any:
    """The same with zeros for tensors of other stages, in a forward that is made again."""
    return tree_map_only(Elsewhere, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device), tree)
