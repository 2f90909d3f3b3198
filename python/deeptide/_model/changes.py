# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Notices that modules got parameters or modules: an engine looks at its model when it may have changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.nn import Module, Parameter
from torch.nn.modules import module as torch_module

if TYPE_CHECKING:
    from deeptide.engine import Engine

_Listener = Callable[[Parameter], None]

_count = 0
_lock = threading.Lock()  # a forked child gets one of its own
_listeners: tuple[_Listener, ...] = ()  # replaced as a whole: other threads are going through it


def _notice(_module: Module, _name: str, registered: Module | Parameter | None) -> None:
    global _count
    _count += 1
    if isinstance(registered, Parameter):
        for listener in _listeners:
            listener(registered)


def _unlock_in_child() -> None:
    """Another thread may have held the lock as the process forked, and that thread is not in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_child)

# Once, as this file is imported, and for good: a hook that comes or goes while another thread builds a model ends that
# thread with "OrderedDict mutated during iteration".
torch_module.register_module_parameter_registration_hook(_notice)
torch_module.register_module_module_registration_hook(_notice)


def listen(listener: _Listener) -> None:
    """From now on, calls `listener` with each parameter that any module of the process gets."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)


def stop_listening(listener: _Listener) -> None:
    """Ends what `listen` began."""
    global _listeners
    with _lock:
        kept = list(_listeners)
        kept.remove(listener)
        _listeners = tuple(kept)


def count() -> int:
    """Registrations so far, by assignment too."""
    return _count


def tell(engine: Engine) -> None:
    """Has the core look at the model at this step if anything was registered since it last looked."""
    if _count != engine._registrations:
        engine._registrations = _count
        engine._core.expect_model_changes()


_PLAIN = (str, int, float, bool, type(None))


class Structure:
    """A model's modules and the plain values that they hold; `restore` brings them back."""

    def __init__(self, model: Module) -> None:
        self._held = [
            (path, module, dict(module._modules), _plain_values(module)) for path, module in model.named_modules()
        ]

    def restore(self) -> str:
        """Undoes what forwards since then have replaced. Returns the path of a replaced module, or an empty text."""
        replaced = ""
        for path, module, children, _ in self._held:
            names = [name for name, child in children.items() if module._modules.get(name) is not child]
            names += [name for name in module._modules if name not in children]
            if not names:
                continue
            replaced = replaced or (f"{path}.{names[0]}" if path else names[0])
            module._modules.clear()
            module._modules.update(children)
        if replaced:  # the values that go with them
            for _, module, _, values in self._held:
                module.__dict__.update(values)
        return replaced


def _plain_values(module: Module) -> dict[str, object]:
    return {key: value for key, value in module.__dict__.items() if isinstance(value, _PLAIN) and key != "training"}
