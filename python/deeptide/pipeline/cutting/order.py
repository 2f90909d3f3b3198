# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tells in which order a module's forward uses its children, where that is not the order of registration."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

_parsing = threading.Lock()  # Python's parser fails where two threads are in it, as ranks may be


def runs_before(parent: torch.nn.Module, one: str, other: str) -> bool:
    """Whether a child runs before another: as the text of forward uses them, else as they were registered."""
    kind: type = type(parent)
    with _parsing:
        used = _used(kind)
    if one in used and other in used:
        return used.index(one) < used.index(other)
    registered = [name for name, _ in parent.named_children()]
    return registered.index(one) < registered.index(other)


@cache
def _used(kind: type) -> list[str]:
    """The attributes of `self` that forward uses, by first use, and in the place of a method those that it alone uses.

    Nothing where there is no text.
    """
    return list(dict.fromkeys(_uses_in(kind, "forward", set())))


def _uses_in(kind: type, method: str, seen: set[str]) -> Iterator[str]:
    if method in seen:
        return
    seen.add(method)
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(kind, method))))
        direct = list(_attributes(ast.parse(text)))
    except (OSError, TypeError, SyntaxError):
        return
    for name in direct:
        if inspect.isfunction(getattr(kind, name, None)):
            yield from (inner for inner in _uses_in(kind, name, seen) if inner not in direct)
        else:
            yield name


def _attributes(node: ast.AST) -> Iterator[str]:
    """Attributes of `self` in the order in which Python comes to them: arguments before a call, an iterable first."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.Call, ast.Assign, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        last = [child for child in children if child in _late_of(node)]
        children = [child for child in children if child not in last] + last
    for child in children:
        yield from _attributes(child)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        yield node.attr


def _late_of(node: Any) -> list[ast.AST]:
    if isinstance(node, ast.Call):
        return [node.func]
    if isinstance(node, ast.Assign):
        return list(node.targets)
    return [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
