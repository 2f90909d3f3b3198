# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.pipe.topology: ranks on a grid with named axes, and the process groups along them."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch.distributed as dist


class ProcessTopology:
    """Ranks on a grid; neighbours in rank order differ in the last axis."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or min(dims, default=1) < 1:
            raise ValueError(f"a topology: got axes {list(axes)} of sizes {list(dims)}, expected a size >= 1 for each")
        self.axes = axes
        self.dims = dims
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]

    @cached_property
    def mapping(self) -> dict[Any, int]:
        """Every rank by its coordinates."""
        grid = itertools.product(*map(range, self.dims))
        return {self.ProcessCoord(*place): rank for rank, place in enumerate(grid)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at coordinates, one for each axis."""
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank: got coordinates of {list(coord_kwargs)}, expected one for each of {list(self.axes)}; "
                "filter_match() takes fewer"
            )
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise ValueError(f"get_rank: {place} is not on the grid {dict(zip(self.axes, self.dims, strict=True))}")
        return self.mapping[place]

    def get_axis_names(self) -> Sequence[str]:
        """The axes in order."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's coordinates as text, such as "model_01"."""
        omitted, place = set(omit_axes), self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omitted]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """An axis's size; 0 if there is none of that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """A rank's coordinates, a named tuple."""
        if not 0 <= rank < self.world_size():
            raise ValueError(f"rank {rank} is not in the topology: expected 0 to {self.world_size() - 1}")
        place = []
        for size in reversed(self.dims):
            rank, coordinate = divmod(rank, size)
            place.append(coordinate)
        return self.ProcessCoord(*reversed(place))

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The lists of ranks that differ along `axis` alone; none if there is no such axis."""
        if axis not in self.axes:
            return []
        stride = math.prod(self.dims[self.axes.index(axis) + 1 :])
        size = self.get_dim(axis)
        firsts = [rank for rank in range(self.world_size()) if rank // stride % size == 0]
        return [[first + i * stride for i in range(size)] for first in firsts]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with these coordinates."""
        for axis in filter_kwargs:
            self._check_axis(axis)
        wanted = filter_kwargs.items()
        return [rank for place, rank in self.mapping.items() if all(getattr(place, a) == i for a, i in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at `idx` of `axis`."""
        self._check_axis(axis)
        return self.filter_match(**{axis: idx})

    def _check_axis(self, axis: str) -> None:
        if axis not in self.axes:
            raise ValueError(f"a topology: got axis {axis!r}, expected one of {list(self.axes)}")

    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages, then data ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, then data ranks, then those that share layers."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _default_topology(world_size: int) -> PipeDataParallelTopology:
    """The world's prime factors, smallest first, in turn to stages and to data ranks."""
    sizes, turn, factor = [1, 1], 0, 2
    while world_size > 1:
        if world_size % factor:
            factor += 1
            continue
        world_size //= factor
        sizes[turn] *= factor
        turn = 1 - turn
    return PipeDataParallelTopology(*sizes)


class PipelineParallelGrid:
    """This rank's place in a topology with the axes pipe and data, and its process groups. Collective.

    Has the methods of Megatron's mpu. process_group is not looked at, as in DeepSpeed.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: object = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topo = topology if topology is not None else _default_topology(self.world_size)
        if self._topo.world_size() != self.world_size:
            sizes = dict(zip(self._topo.axes, self._topo.dims, strict=True))
            raise ValueError(
                f"the grid {sizes} has {self._topo.world_size()} ranks, but the world has {self.world_size}"
            )
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(self._topo.get_dim("model"), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self._make_groups()

    def _is_grid_valid(self) -> bool:
        """Whether the topology has a place for each rank; __init__ raises where it has not."""
        return self._topo.world_size() == dist.get_world_size()

    def _mine(self, lists: list[list[int]]) -> tuple[list[int], Any]:
        """This rank's list and its group; all ranks make all groups in one order."""
        mine: tuple[list[int], Any] | None = None
        for ranks in lists:
            group = dist.new_group(ranks=ranks)
            if self.global_rank in ranks:
                mine = ranks, group
        assert mine is not None  # each axis's lists hold every rank
        return mine

    def _make_groups(self) -> None:
        topology = self._topo
        replicas = [topology.get_axis_list("data", i) for i in range(self.data_parallel_size)]
        ranks, self.ds_model_proc_group = self._mine(replicas)
        self.ds_model_world_size, self.ds_model_rank = len(ranks), ranks.index(self.global_rank)
        self.dp_groups = topology.get_axis_comm_lists("data")
        self.dp_group, self.dp_proc_group = self._mine(self.dp_groups)
        self.pipe_groups = topology.get_axis_comm_lists("pipe")
        self.pp_group, self.pp_proc_group = self._mine(self.pipe_groups)
        self.p2p_groups = [[rank, self._stage_after(rank)] for rank in range(self.world_size)]
        slices = topology.get_axis_comm_lists("model")
        if self.model_parallel_size == 1:
            slices = [[rank] for rank in range(self.world_size)]
        self.slice_group, self.slice_proc_group = self._mine(slices)

    def process_groups(self) -> list[Any]:
        """Those of this rank."""
        return [self.ds_model_proc_group, self.dp_proc_group, self.pp_proc_group, self.slice_proc_group]

    def _stage_after(self, rank: int) -> int:
        """The same place in the next stage; after the last one, in the first."""
        place = self._topo.get_coord(rank)
        return self._topo.get_rank(**place._replace(pipe=(place.pipe + 1) % self.pipe_parallel_size)._asdict())

    def get_stage_id(self) -> int:
        """This rank's stage."""
        return self._topo.get_coord(self.global_rank).pipe  # type: ignore[no-any-return]

    def get_data_parallel_id(self) -> int:
        """This rank's pipeline."""
        return self._topo.get_coord(self.global_rank).data  # type: ignore[no-any-return]

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank at this rank's place in another stage; `kwargs`: other coordinates that differ."""
        place = self._topo.get_coord(self.global_rank)
        return self._topo.get_rank(**place._replace(pipe=stage_id, **kwargs)._asdict())

    def topology(self) -> ProcessTopology:
        """The grid's topology."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank's number in the world."""
        return self.global_rank

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """The ranks of this rank's pipeline."""
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        """This rank's pipeline."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """The number of pipelines."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """The ranks of this stage that train on other batches."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their numbers in the world."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that share one copy of the model, over stages and layers."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """How many they are."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Their group."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """This rank's number among those that share layers; 0 without an axis "model"."""
        return getattr(self._topo.get_coord(self.global_rank), "model", 0)

    def get_slice_parallel_world_size(self) -> int:
        """How many they are."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Their group."""
        return self.slice_proc_group

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size


def _prime_factors(number: int) -> list[int]:
    """The prime factors, ascending, each as often as it divides. Errors: ValueError below 1."""
    if number < 1:
        raise ValueError(f"prime factors of {number}: expected a number of at least 1")
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
