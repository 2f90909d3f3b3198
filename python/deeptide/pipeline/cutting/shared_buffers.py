# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Buffers of modules that several stages use: each stage has its own, so what a forward writes there would part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from deeptide.pipeline.errors import PipelineError


class _Shared(NamedTuple):
    name: str
    module: torch.nn.Module
    attribute: str
    stages: list[int]


class SharedBuffers:
    """Those of one stage. Constants, such as tables of positions, may be shared; running statistics may not."""

    def __init__(self, modules: Iterable[tuple[str, torch.nn.Module, list[int]]]) -> None:
        """modules: with their names, and the stages that use them."""
        self._shared = [
            _Shared(f"{path}.{name}", module, name, stages)
            for path, module, stages in modules
            if len(stages) > 1
            for name in module._buffers
        ]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around a forward of this stage. Errors: PipelineError naming a buffer that it has changed.

        Values are compared: an operator may write without telling autograd, as batch_norm.
        """
        before = [self._copy(each) for each in self._shared]
        yield
        for each, value in zip(self._shared, before, strict=True):
            now = each.module._buffers.get(each.attribute)
            if (now is None) != (value is None) or (now is not None and not torch.equal(now, value)):  # type: ignore[arg-type]
                raise PipelineError(
                    f"'{each.name}' is written in forward, and stages {', '.join(map(str, each.stages))} use its "
                    f"{type(each.module).__name__}: each stage would have a buffer of its own, and the running "
                    "statistics of neither would be those of the uncut model. Give each stage's layers a module of "
                    "their own, or put them into one stage, as by parallel.pipeline.cut"
                )

    @staticmethod
    def _copy(shared: _Shared) -> torch.Tensor | None:
        value = shared.module._buffers.get(shared.attribute)
        return None if value is None else value.detach().clone()
