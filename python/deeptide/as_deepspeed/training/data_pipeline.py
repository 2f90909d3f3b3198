# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's schedules of curricula, random-LTD and progressive layer drop, with the state that programs read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from deeptide import _C, config


class CurriculumScheduler:
    """A schedule from a dictionary; `state` is what DeepSpeed's holds."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._schedule = _C.CurriculumSchedule.from_text(json.dumps(config))
        self._config: dict[str, Any] = {
            name: config[name]
            for name in ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
            if name in config
        }

    @property
    def state(self) -> dict[str, Any]:
        """The settings and the difficulty of now; a copy."""
        return {**self._config, "current_difficulty": self._schedule.current}

    def get_state(self) -> dict[str, Any]:
        """The settings and the difficulty of now."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from the difficulty of a state."""
        self._schedule.set_current(int(state["current_difficulty"]))

    def get_current_difficulty(self) -> int:
        """The difficulty of the last update."""
        return self._schedule.current

    def set_current_difficulty(self, difficulty: int) -> None:
        """Sets the difficulty from which the next update goes on."""
        self._schedule.set_current(difficulty)

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Sets the function of a schedule "custom"."""
        self._schedule.set_function(schedule_function)

    def get_difficulty(self, global_steps: int) -> int:
        """The schedule's value at a step; changes nothing."""
        return self._schedule.at(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Moves to a step and returns its difficulty."""
        return self._schedule.update(global_steps)


class RandomLTDScheduler:
    """A schedule from the section "random_ltd" with `global_batch_size`."""

    def __init__(self, config: dict[str, Any]) -> None:
        section = {
            name: value for name, value in config.items() if name not in ("global_batch_size", "micro_batch_size")
        }
        self._section = section
        self._batch = int(config["global_batch_size"])
        self.model_layer_num = int(config["total_layer_num"])
        self.random_ltd_layer_num = int(config["random_ltd_layer_num"])
        self.reset_to_init()

    def reset_to_init(self) -> None:
        """Begins anew."""
        data = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": self._section}}}
        self._schedule = _C.RandomLtdSchedule.from_config(config.load_config(data), self._batch)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Tokens times layers of so many steps from now on."""
        return self._schedule.layer_tokens_after(train_iters)

    def get_value(self, global_steps: int) -> int:
        """The schedule's tokens at a step; changes nothing."""
        return self._schedule.at(global_steps)

    def get_current_seq(self) -> int:
        """The tokens of the last update."""
        return self._schedule.position[1]

    def set_current_seq(self, seq_length: int) -> None:
        """Sets the tokens from which the next update goes on."""
        step, _, tokens = self._schedule.position
        self._schedule.set_position(step, seq_length, tokens)

    def get_random_ltd_layer_num(self) -> int:
        """The layers that drop tokens."""
        return self.random_ltd_layer_num

    def update_seq(self, global_steps: int) -> None:
        """Moves to a step; its tokens count once."""
        self._schedule.update(global_steps)

    def state_dict(self) -> dict[str, Any]:
        """How far it went."""
        step, length, tokens = self._schedule.position
        return {
            "consumed_layer_tokens": tokens,
            "current_steps": step,
            "current_value": length,
            "min_value": self._schedule.min_length,
            "max_value": self._schedule.max_length,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where a state was."""
        self._schedule.set_position(
            state_dict["current_steps"], state_dict["current_value"], state_dict["consumed_layer_tokens"]
        )


class ProgressiveLayerDrop:
    """The share of layers to keep, and the arguments that forward gets."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self._schedule = _C.LayerDropSchedule(theta, gamma)
        self.theta, self.gamma = theta, gamma

    @property
    def current_theta(self) -> float:
        """The share of now."""
        return self._schedule.current

    def get_theta(self) -> float:
        """The share of now."""
        return self._schedule.current

    def get_state(self) -> dict[str, Any]:
        """The arguments for forward."""
        return {"progressive_layer_drop": True, "pld_theta": self._schedule.current}

    def update_state(self, global_step: int) -> None:
        """Takes the share of a step."""
        self._schedule.update(global_step)


def get_data_efficiency_config(param_dict: dict[str, Any]) -> dict[str, Any]:
    """The section "data_efficiency" with its defaults; `param_dict` stays as it is."""
    section = copy.deepcopy(param_dict.get("data_efficiency", {}))
    filled: dict[str, Any] = json.loads(
        _C.config_section(config.load_config({"data_efficiency": section}), "data_efficiency")
    )
    return filled
