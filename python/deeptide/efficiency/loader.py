# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A loader whose samples follow a curriculum, and the sampler under DeepSpeed's name."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

from deeptide import _C
from deeptide._C import Config, World
from deeptide.data import _count

Schedules = dict[str, Callable[[int], int]]


class CurriculumBatches:
    """This rank's micro-batches of indices, without end until num_epochs are over; what torch calls a batch sampler."""

    def __init__(self, sampler: _C.CurriculumSampler) -> None:
        self._sampler = sampler
        self._places: deque[tuple[int, int, int]] = deque()  # after each batch that a loader fetches ahead

    def __iter__(self) -> Iterator[list[int]]:
        while (indices := self._sampler.next()) is not None:
            self._places.append(self._sampler.position())
            yield indices

    def given(self) -> tuple[int, int, int]:
        """The position after the oldest batch that was fetched and not yet given."""
        return self._places.popleft()

    def clear(self) -> None:
        """Forgets what was fetched ahead."""
        self._places.clear()


class CurriculumLoader:
    """This rank's micro-batches of `dataset` by "data_efficiency.data_sampling.curriculum_learning".

    Iterating again goes on where the last iteration ended: a curriculum has no epochs.
    """

    def __init__(
        self,
        dataset: Any,
        config: Config,
        sizes: _C.BatchSizes,
        collate_fn: Callable[[list[Any]], Any] | None,
        world: World,
    ) -> None:
        section = json.loads(_C.config_section(config, "data_efficiency"))
        self.dataset = dataset
        self.batch_size = sizes.micro
        self._world_batch = sizes.micro * world.size
        self.curriculum = _C.CurriculumSampler(
            json.dumps(section),
            _count(dataset),
            micro_batch=sizes.micro,
            accumulation=sizes.accumulation,
            rank=world.rank,
            world_size=world.size,
            drop_last=config.dataloader_drop_last,
        )
        self._batches = CurriculumBatches(self.curriculum)
        self._place = self.curriculum.position()
        self._moved = False  # the position was set since the iteration began
        self._torch_loader: Any = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=self._batches,
            collate_fn=collate_fn,
            num_workers=section["data_sampling"]["num_workers"],
            pin_memory=section["data_sampling"]["pin_memory"] and torch.cuda.is_available(),
            generator=torch.Generator(),
        )
        self.post_process: Callable[[Any, dict[str, Any]], Any] | None = None

    @property
    def data_sampler(self) -> CurriculumLoader:
        """The sampler's state and functions, under DeepSpeed's name."""
        return self

    def __len__(self) -> int:
        return self.curriculum.total_samples() // self._world_batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            # Batches that an earlier iteration fetched ahead and did not give are drawn again.
            if self.curriculum.position() != self._place:
                self.curriculum.load_state(self.curriculum.state(self._place))
            self._batches.clear()
            self._moved = False
            for batch in self._torch_loader:
                self._place = self._batches.given()
                yield batch if self.post_process is None else self.post_process(batch, self.state_dict())
                if self._moved:
                    break
            else:
                return

    def set_custom_curriculum_learning_schedule(self, functions: Schedules) -> None:
        """Sets the functions of metrics whose schedule is "custom"; each takes a step and returns a difficulty."""
        for metric, function in functions.items():
            self.curriculum.set_function(metric, function)

    def position(self) -> tuple[int, int, int]:
        """After the last batch that was given."""
        return self._place

    def state_dict(self, position: tuple[int, int, int] | None = None) -> dict[str, Any]:
        """The state at a position, by default after the last batch that was given.

        `difficulties` are those of the last step drawn.
        """
        state = json.loads(self.curriculum.state(position or self._place))
        log = state["log"]
        now = dict(zip(state["metrics"], log[-1][2], strict=True)) if log else {}
        return {
            "curriculum": state,
            "consumed_samples": state["consumed"],
            "curriculum_step": state["step"],
            "current_difficulties": now,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was. Errors: ConfigError for one of another data set, seed or metrics."""
        if "curriculum" not in state:
            raise _C.ConfigError(
                "the checkpoint's data position is of a loader without a curriculum; load it without the section "
                "data_efficiency.data_sampling.curriculum_learning, or begin the data anew"
            )
        self.curriculum.load_state(json.dumps(state["curriculum"]))
        self._place = self.curriculum.position()
        self._moved = True


class DeepSpeedDataSampler:
    """DeepSpeed's constructor over the same draws. Each rank draws by itself: the groups have no effect."""

    def __init__(
        self,
        data_efficiency_config: dict[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any = None,
        gradient_accumulation_steps: int = 1,
        global_rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        self._sampler = _C.CurriculumSampler(
            json.dumps(data_efficiency_config),
            one_epoch_total_samples,
            micro_batch=micro_batch_size,
            accumulation=gradient_accumulation_steps,
            rank=data_parallel_rank,
            world_size=data_parallel_size,
            drop_last=drop_last,
        )

    def __len__(self) -> int:
        return self._sampler.total_samples()

    def __iter__(self) -> Iterator[list[int]]:
        while (indices := self._sampler.next()) is not None:
            yield indices

    @property
    def current_difficulties(self) -> dict[str, int]:
        """The difficulties of the last step by metric."""
        return self._sampler.difficulties()

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Schedules) -> None:
        """Sets the functions of metrics whose schedule is "custom"."""
        for metric, function in schedule_func_dict.items():
            self._sampler.set_function(metric, function)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was drawn."""
        place = self._sampler.position()
        return {"curriculum": json.loads(self._sampler.state(place)), "consumed_samples": place[2]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the state was. Errors: ConfigError for one of another data set, seed or metrics."""
        self._sampler.load_state(json.dumps(state_dict["curriculum"]))
