# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Says what an act must give: values, or one of the documented errors. And the programs that nothing is said about."""

from typing import NamedTuple


class Raises(NamedTuple):
    """One of these exception types, with this pattern in its text; an undocumented reason stands in no pattern."""

    kinds: tuple[str, ...]
    pattern: str

    def __or__(self, other: "Raises | None") -> "Raises":
        """Either of both; this one where there is no other."""
        return self if other is None else Raises((*self.kinds, *other.kinds), f"{self.pattern}|{other.pattern}")


class UndefinedError(Exception):
    """Neither torch nor the documentation says what this act does here; the generator leaves it out."""


class OpenError(UndefinedError):
    """A result that is known and wrong: see tests/fuzz/open. The program is left out at this setting."""


MOVED = Raises(("ValueError",), "got other memory after initialize")
UNFROZEN = Raises(("ValueError",), "was frozen at initialize and requires grad now")
BY_HAND = Raises(("ValueError",), r"has a \.grad that was set by hand")
OF_ANOTHER = Raises(("RuntimeError", "CommError"), r"failed on rank \d before it began")
NO_GRADIENT = Raises(("ValueError",), r"step\(\) before backward\(\)")
NO_SYNC = Raises(("ConfigError",), "no_sync needs ZeRO stage 0 or 1")
NO_NEW_GROUP = Raises(("ConfigError",), "is not one of the model's")
DIFFERENT_CALLS = Raises(("CommError",), "the ranks called different methods")
RAW = Raises(("RuntimeError", "ValueError"), "was accessed directly while it is sharded")
NO_STATE = Raises(("ValueError",), "has no state 'momentum'")
NOT_OPTIMIZED = Raises(("ValueError",), "it is not optimized")
MISFIT = Raises(("CheckpointError",), r"does not fit the model \(nothing was changed\)")
TWO_VALUES = Raises(("CheckpointError",), r"the checkpoint has two values for them \(nothing was changed\)")
NOT_REBUILT = Raises(("ValueError",), "rebuild (between|within)")
REBUILD_OF_ANOTHER = Raises(("ValueError", "RuntimeError"), r"rebuild (between|within)|failed on rank \d before")
OWN_REBUILT = Raises(("ValueError",), "rebuild: an optimizer of the program's own keeps its states itself")
NO_SUCH_MODEL = Raises(("ValueError",), "only dense parameters are supported")
IN_FILES = Raises(("ValueError",), "rebuild: states or parameters lie in files")
AWAY = Raises(("ValueError",), "offload_states: the states are offloaded already")
NOT_OURS = Raises(("ValueError",), "offload_states is for the optimizers of deeptide")
NOT_AWAY = Raises(("ValueError",), "reload_states: no states are offloaded")
NOT_MOVED = Raises(("ValueError", "RuntimeError"), r"offload_states between|failed on rank \d before")
MOVED_ALREADY = Raises(("ValueError",), "keeps optimizer states in files already")
NO_STATE_DICT = Raises(("RuntimeError",), "use engine.save_checkpoint")
NO_LOADED_STATE = Raises(("RuntimeError",), "use engine.load_checkpoint")
NO_OWN_GROUP = Raises(("ConfigError",), "add_param_group: an optimizer of the program's own")
NEEDS_GRAD = Raises(("ValueError",), "the loss does not require grad")
