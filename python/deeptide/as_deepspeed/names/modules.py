# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the modules of `deepspeed` from the table of names: each name is looked up when it is first used."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from deeptide.as_deepspeed import INTERFACE_VERSION, SITE, NotSupportedError
from deeptide.as_deepspeed.names import surface
from deeptide.as_deepspeed.names.table import ALIASES, MODULES, Name, Status


class MissingNameError(AttributeError):
    """A name that this interface does not have."""


class _RefusedType(type):
    """The type of a class that stands for what is not here: it may be imported and compared with, not used."""

    _text: str

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotSupportedError(cls._text)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSupportedError(cls._text)


def refuse(module: str, name: str, note: str) -> type:
    """A stand-in for a name that is known and not here."""
    text = f"{module}.{name} is not supported by Deeptide: {note}"
    return _RefusedType(name, (), {"_text": text, "__doc__": text, "__module__": module})


def resolve(module: str, name: str, entry: Name) -> Any:
    """The object that a name of the table stands for."""
    if entry.status is Status.refused:
        return refuse(module, name, entry.note)
    home, _, attribute = entry.target.partition(":")
    found = importlib.import_module(home)
    for part in attribute.split(".") if attribute else ():
        found = getattr(found, part)
    return found


def _submodule(full_name: str) -> str | None:
    """The module that `full_name` stands for; None if there is none."""
    if full_name in ALIASES:
        return ALIASES[full_name]
    known = full_name in MODULES or _has_modules(full_name) or full_name in surface.paths()
    return full_name if known else None


def _paths_of(module: str) -> list[str]:
    """The paths under which DeepSpeed has what is one module here."""
    return [module, *(path for path, target in ALIASES.items() if target == module)]


def _has_modules(full_name: str) -> bool:
    return any(module.startswith(full_name + ".") for module in (*MODULES, *ALIASES))


def _lookup(module: str, names: dict[str, Any]) -> Callable[[str], Any]:
    """The __getattr__ of a module."""

    def look(name: str) -> Any:
        entry = MODULES.get(module, {}).get(name)
        if entry is not None:
            value = resolve(module, name, entry)
        elif (target := _submodule(f"{module}.{name}")) is not None:
            value = importlib.import_module(target)
        elif name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        elif any(name in surface.members(path) for path in _paths_of(module)):
            value = refuse(module, name, f"it is in DeepSpeed {INTERFACE_VERSION}, and nothing here stands for it")
        else:
            raise MissingNameError(
                f"{module}.{name} is not in Deeptide's interface of deepspeed {INTERFACE_VERSION}; "
                "docs/from-deepspeed.md lists what is, and what to use instead"
            )
        if name != "mpu":  # which is another one after another initialize
            names[name] = value
        return value

    return look


def fill(module: str, names: dict[str, Any]) -> None:
    """Gives a module its names of the table: each is looked up when it is first used."""
    names["__getattr__"] = _lookup(module, names)
    names["__all__"] = [name for name in MODULES.get(module, {}) if not name.startswith("_")]
    names["__dir__"] = lambda: sorted({*names, *MODULES.get(module, {})})


class _Module(ModuleType):
    """A module of the table. A function keeps its name where importlib binds a submodule that is called the same."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in MODULES.get(self.__name__, {})):
            super().__setattr__(name, value)


class _Finder:
    """Finds and loads the modules of the table, after all other finders."""

    def find_spec(
        self, full_name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not full_name.startswith("deepspeed.") or _submodule(full_name) is None:
            return None
        if full_name not in ALIASES and not (surface.is_package(full_name) or _has_modules(full_name)):
            return importlib.machinery.ModuleSpec(full_name, self)  # type: ignore[arg-type]
        spec = importlib.machinery.ModuleSpec(full_name, self, is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = [os.path.join(SITE, *full_name.split("."))]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        target = ALIASES.get(spec.name)
        return None if target is None else importlib.import_module(target)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in MODULES or module.__name__ not in ALIASES:
            fill(module.__name__, module.__dict__)
            module.__class__ = _Module


def install(names: dict[str, Any]) -> None:
    """Fills the module `deepspeed` and makes those below it importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    fill("deepspeed", names)
