# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's set_train_batch_size: other numbers of micro-batches per step, while an engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from deeptide._C import ConfigError
from deeptide.as_deepspeed import NotSupportedError

if TYPE_CHECKING:
    from deeptide import _C


class BatchSizeMethods:
    """The methods; of DeepSpeedEngine. The core keeps the configuration's accumulation and is told each boundary."""

    if TYPE_CHECKING:
        _core: _C.Engine
        _boundary: bool | None
        train_micro_batch_size_per_gpu: Callable[[], int]

        @property
        def data_parallel_size(self) -> int:
            """The engine's."""

    _accumulation: int | None = None  # what set_train_batch_size made of it
    _micro_batch = 0  # of the step that is under way
    _scaled = False  # the gradients that are held came by backward(), which scales them

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._accumulation or self._core.batch_sizes().accumulation

    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.data_parallel_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch, micro-batch, accumulation steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the accumulation steps so that a step has so many samples. Between steps, on all ranks alike.

        Gradients must then come from engine.backward(). global_samples goes on to count the configuration's batch.
        Errors: ValueError if micro-batch and ranks do not divide it, or within an accumulation.
        """
        of_one = self.train_micro_batch_size_per_gpu() * self.data_parallel_size
        if train_batch_size < 1 or train_batch_size % of_one:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): expected a multiple of {of_one}, which is "
                f"{self.train_micro_batch_size_per_gpu()} samples on each of {self.data_parallel_size} ranks"
            )
        accumulation = train_batch_size // of_one
        if accumulation == self.gradient_accumulation_steps():
            return
        if self._core.has_gradients():
            raise ValueError(
                f"set_train_batch_size({train_batch_size}) within an accumulation: call it after a step, or after "
                "zero_grad()"
            )
        self._accumulation, self._micro_batch = accumulation, 0
        self._tell_boundary()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Only samples are counted by it, so another size is an error."""
        if micro_batch_size != self.train_micro_batch_size_per_gpu():
            raise ConfigError(
                f"set_train_micro_batch_size({micro_batch_size}): it is {self.train_micro_batch_size_per_gpu()}; "
                "batches may have any size in fact, and only the count of samples follows the configuration"
            )

    def _tell_boundary(self) -> None:
        """Gives the core the boundary that follows from a changed accumulation, unless the program sets it itself."""
        if self._accumulation is not None and self._boundary is None:
            self._core.set_gradient_accumulation_boundary(self._micro_batch + 1 == self._accumulation)

    def _scaled_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for a core that divides by the configuration's accumulation."""
        assert self._accumulation is not None
        self._scaled = True
        return loss * (self._core.batch_sizes().accumulation / self._accumulation)

    def _check_scaled(self) -> None:
        """Errors: NotSupportedError where gradients of plain autograd would be divided by another number."""
        if self._accumulation is not None and not self._scaled and self._core.has_gradients():
            raise NotSupportedError(
                "after set_train_batch_size gradients must come from engine.backward(loss); this step's came from "
                "loss.backward(), which knows the configuration's accumulation alone"
            )

    def _end_micro_batch(self, at_boundary: bool) -> None:
        self._micro_batch = 0 if at_boundary else self._micro_batch + 1
        self._scaled = self._scaled and not at_boundary
        self._tell_boundary()
