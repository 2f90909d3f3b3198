# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The ranks that share layers, as layers hold them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from deeptide import _C
from deeptide._C import World


class Team:
    """Neighbouring ranks that share layers and train on equal batches. Copies of a model share its team."""

    def __init__(self, core: _C.TensorTeam) -> None:
        self.core = core
        self.size, self.index = core.size, core.index
        self.alike: set[torch.Size] = set()  # shapes of activations that were found equal on all of them

    @property
    def data_rank(self) -> int:
        """This rank's number among those that train on other batches with the same slices."""
        return self.core.data_rank

    @property
    def data_size(self) -> int:
        """How many they are."""
        return self.core.data_size

    def any(self, own: bool) -> bool:
        """Whether it is true on one of them. Collective."""
        return bool(self.core.all_gather(torch.tensor(float(own)), "forward").any())

    def check_alike(self, loss: torch.Tensor) -> None:
        """Collective. Errors: ValueError if the ranks' losses are not of equal batches, on all of them."""
        if loss.numel() != 1:
            return  # an error of its own
        losses = self.core.all_gather(loss.detach().double().cpu(), "backward").flatten().tolist()
        most = max(abs(value - losses[0]) for value in losses)
        if most > 1e-3 * abs(losses[0]):  # of rounding, where ranks have different kernels or numbers of threads
            raise ValueError(
                f"the {self.size} ranks that share layers have the losses {', '.join(f'{v:.6g}' for v in losses)}: "
                "they train on equal batches. Read batches by engine.data_parallel_rank of "
                "engine.data_parallel_size, not by the rank in the world"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Team:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model whose layers are shared by ranks cannot be pickled: each has a part. Save what "
            "engine.whole_state_dict() gives, or call engine.save_16bit_model(folder), on all ranks"
        )

    def __repr__(self) -> str:
        return f"Team(size={self.size}, index={self.index})"


def make_team(
    size: int,
    world: World | None = None,
    timeout_s: float = 600.0,
    stages: int = 1,
    device: torch.device | str = "cpu",
) -> Team:
    """The team of this rank among neighbours: of four ranks and size 2, ranks 0 and 1, and ranks 2 and 3. Collective.

    world: a deeptide.World; else torch.distributed's, else the launcher's. stages: of the pipeline that the model is
    cut into. device: where the model lies or will lie, if no world is given. Errors: ConfigError if the ranks do not
    divide among such teams; CommError.
    """
    if world is None:
        from deeptide._process.world import find_world

        world = find_world(None, torch.device(device), timeout_s=timeout_s)[0]
    return Team(_C.TensorTeam(world, size, timeout_s, stages))


def team_of(model: torch.nn.Module) -> Team | None:
    """The team that shares the model's layers; None where none does."""
    for module in model.modules():
        team = module.__dict__.get("tensor_team")
        if team is not None:
            assert isinstance(team, Team)
            return team
    return None
