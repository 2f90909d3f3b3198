# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# A part of _C.pyi: schedules of pipelines and their simulator. No module of its own.
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from ._C import ModelDescription, ParameterGroup, World, _Bound, _BoundEnum

class InitOptions(_Bound):
    def __init__(
        self,
        world: World | None = None,
        groups: Sequence[ParameterGroup] = [],
        optimizer: str | None = None,
        describe: Callable[[], ModelDescription] | None = None,
        custom: object = None,
        stages: int = 1,
    ) -> None: ...

class PipelineStage(_Bound):
    @property
    def index(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def data_rank(self) -> int: ...
    @property
    def data_size(self) -> int: ...
    def send(self, tensor: torch.Tensor, stage: int) -> None: ...
    def expect(self, tensor: torch.Tensor, stage: int) -> int: ...
    def receive(self, letter: int) -> torch.Tensor: ...
    def flush(self) -> None: ...
    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None: ...
    def exchange(self, values: Sequence[float]) -> list[float]: ...

def stage_of_rank(rank: int, stages: int, ranks: int) -> int: ...

class PipelineSchedule(_BoundEnum):
    gpipe: ClassVar[PipelineSchedule]
    one_f_one_b: ClassVar[PipelineSchedule]
    interleaved: ClassVar[PipelineSchedule]
    zero_bubble: ClassVar[PipelineSchedule]

class StageAction(_BoundEnum):
    receive_activation: ClassVar[StageAction]
    forward: ClassVar[StageAction]
    send_activation: ClassVar[StageAction]
    receive_gradient: ClassVar[StageAction]
    backward: ClassVar[StageAction]
    backward_input: ClassVar[StageAction]
    backward_weight: ClassVar[StageAction]
    send_gradient: ClassVar[StageAction]

class StageInstruction(_Bound):
    def __init__(self, action: StageAction, micro_batch: int, chunk: int = 0) -> None: ...
    @property
    def action(self) -> StageAction: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def chunk(self) -> int: ...

class StageCosts(_Bound):
    def __init__(
        self,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        transfer: float = 0.0,
    ) -> None: ...
    @property
    def forward(self) -> float: ...
    @property
    def backward_input(self) -> float: ...
    @property
    def backward_weight(self) -> float: ...
    @property
    def transfer(self) -> float: ...

class SimulatedStep(_Bound):
    @property
    def time(self) -> float: ...
    @property
    def idle(self) -> list[float]: ...
    @property
    def peak_activations(self) -> list[int]: ...
    @property
    def bubble(self) -> float: ...

def stage_instructions(
    schedule: PipelineSchedule, stages: int, micro_batches: int, stage: int, chunks: int = 1
) -> list[StageInstruction]: ...
def simulate_pipeline(
    instructions: Sequence[Sequence[StageInstruction]], micro_batches: int, costs: StageCosts, chunks: int = 1
) -> SimulatedStep: ...
def published_idle_time(
    schedule: PipelineSchedule, stages: int, micro_batches: int, costs: StageCosts, chunks: int = 1
) -> float: ...
def published_peak_activations(
    schedule: PipelineSchedule, stages: int, micro_batches: int, stage: int, chunks: int = 1
) -> int: ...
