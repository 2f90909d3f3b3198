# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The hand-written stub of the C++ module, `_C.pyi`, and the package's types agree with what is built."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deeptide import _C

# The stub states more here than pybind11 knows (pointers that may be null, tuples and dicts built by hand): what
# pybind11 knows.
_STUB_IS_MORE_EXACT = {
    "Engine.full_state": "Tensor",
    "Engine.stage": "object",
    "Hyperparameters.optimizer": "OptimizerInfo",
    "ValueParts.of": "ValueParts",
    "elastic_batch": "tuple",
    "find_optimizer": "OptimizerInfo",
    "kernel_targets": "dict",
}
_STUBTEST_SETTINGS = """
[mypy]
[mypy-torch.*,numpy.*,lightning.*,wandb.*,comet_ml.*]
follow_imports = skip
ignore_missing_imports = True
"""
_STUBTEST_ALLOWS = r"""
# Parts of _C's stub, which is one module
deeptide\._C_(checkpoint|curriculum|deferred|layers|memory|parallel|reports)
# functools.cache: its type has lost the parameters that inspect still finds
deeptide\._process\.operators\._share
deeptide\._optimizers\.groups\.(_table_of|keys_of)
deeptide\._model\.compiled\.(_say_once|_serve_compiled_graphs)
deeptide\.tensor\.positions\._derived
deeptide\._commands\.explain\.pattern_of
deeptide\._model\.publishing\._watch_forks
deeptide\.efficiency\.token_arguments\.names_of
deeptide\.pipeline\.cutting\.order\._used
deeptide\.accelerator\.get_accelerator
deeptide\.as_deepspeed\.config\.configuration\._schema
deeptide\.as_deepspeed\.helpers\.small\._say_leaves
# Classes and functions that a table names
deeptide\.as_deepspeed\.helpers\.op_builders\.\w+Builder
deeptide\.as_deepspeed\.config\.values\.get_\w+
# mypy takes another's decorated function for a variable
deeptide\.as_deepspeed\.helpers\.flat\.LinearFunctionForZeroStage3\.apply
# A class inside a function
deeptide\._model\.compiled\.PieceCompiler@\d+
# enum gives its classes a __new__ of its own
deeptide\.as_deepspeed\.config\.configuration\.(_TextEnum|Offload\w+Enum)\.__new__
# Lightning is optional
deeptide\.lightning.*
deeptide\.as_deepspeed\.helpers\.logging\.(_once|warning_once)
"""


def _allowed(package):
    """The lines of an allow list: those above, and what the sources themselves show.

    mypy does not follow torch, so a class with a base of it has another metaclass; a class to be mixed in declares for
    type checkers what its neighbours bring.
    """
    of_torch, declared = [], []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            if any(ast.unparse(base).startswith("torch.") for base in node.bases):
                of_torch.append(f"{module}.{node.name}")
            blocks = [n for n in node.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
            names = [n.name for block in blocks for n in block.body if isinstance(n, ast.FunctionDef)]
            declared += [f"{module}.{node.name}.{name}" for name in names]
    assert of_torch
    assert declared
    return _STUBTEST_ALLOWS + "".join("|".join(map(re.escape, names)) + "\n" for names in (of_torch, declared))


def _type_text(annotation):
    """A type without the modules that its names are from."""
    text = "" if annotation is None else ast.unparse(annotation)
    # Evens out what pybind11 writes differently between the versions that torch brings along.
    text = re.sub(r"typing\.SupportsInt( \| typing\.SupportsIndex)?", "int", text)
    text = re.sub(r"typing\.SupportsFloat( \| typing\.SupportsIndex)?", "float", text)
    return re.sub(r"\b\w+\.(?=\w)", "", text)


def _signature(function):
    """([(kind, name, type, default), ...], result) of a function's definition, without self."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [("positional", *pair) for pair in zip(positional, defaults, strict=True)]
    pairs += [("keyword", *pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    parameters = [
        (kind, parameter.arg, _type_text(parameter.annotation), default and ast.unparse(default))
        for kind, parameter, default in pairs
        if parameter.arg != "self"
    ]
    return parameters, _type_text(function.returns)


def _bound_signatures(name, member):
    """The signatures that pybind11 wrote into a member's docstring: one for each overload, none for other members."""
    is_property = isinstance(member, property)
    text = getattr(member.fget if is_property else member, "__doc__", None) or ""
    text = re.sub(r" = <\S+ object at 0x[0-9a-f]+>", " = ...", text).replace("deeptide::", "")
    lines = re.findall(rf"^(?:\d+\. )?(?:{name})?(\(.*\) -> .+)$", text, re.MULTILINE)
    signatures = [_signature(ast.parse(f"def f{line}: ...").body[0]) for line in lines]
    return [([], result) for _, result in signatures] if is_property else signatures


def _bound():
    """{"Class.name" or "name": signatures} of every function, method and property that C++ binds."""
    found = {}
    classes = [value for value in vars(_C).values() if isinstance(value, type)]
    for prefix, holder in [("", _C), *((f"{kind.__name__}.", kind) for kind in classes)]:
        for name in vars(holder):
            member = getattr(holder, name)
            if callable(member) or isinstance(member, property):
                found[prefix + name] = _bound_signatures(name, member)
    return {name: signatures for name, signatures in found.items() if signatures}


_PARTS = ("checkpoint", "curriculum", "deferred", "layers", "memory", "parallel", "reports")


def _in_stub():
    """{"Class.name" or "name": signatures} of the stub; an enumeration has its base's members too."""
    found = {}

    def take(prefix, body):
        for node in body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(prefix + node.name, []).append(_signature(node))
            elif isinstance(node, ast.AnnAssign) and prefix and "ClassVar" not in ast.unparse(node.annotation):
                found[prefix + node.target.id] = [([], _type_text(node.annotation))]

    parts = [
        ast.parse(Path(_C.__file__).with_name(name).read_text())
        for name in ("_C.pyi", *(f"_C_{part}.pyi" for part in _PARTS))
    ]
    body = [node for part in parts for node in part.body]
    take("", body)
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        if not name.startswith("_"):
            if node.bases[0].id == "_BoundEnum":
                take(f"{name}.", classes["_BoundEnum"].body)
            take(f"{name}.", node.body)
    return found


def _comparable(full_name, signatures):
    """Without what cannot agree: operators have no parameter names in C++."""
    name = full_name.rpartition(".")[2]
    if not name.startswith("__") or name == "__init__":
        return signatures
    return [([(kind, type_, default) for kind, _, type_, default in given], result) for given, result in signatures]


def test_stub_has_the_signatures_that_are_bound():
    bound, stub = _bound(), _in_stub()
    operators = {name for name in bound if re.search(r"\b__\w+__$", name) and not name.endswith("__init__")}
    assert len(bound) > 150  # else the docstrings were not read
    assert {*bound} - operators - {*stub} == set(), "bound, but not in the stub"
    assert {*stub} - {*bound} == set(), "in the stub, but not bound"
    differences = []
    for name in stub:
        is_bound, is_written = _comparable(name, bound[name]), _comparable(name, stub[name])
        if name in _STUB_IS_MORE_EXACT:
            assert [result for _, result in is_bound] == [_STUB_IS_MORE_EXACT[name]]
            assert [result for _, result in is_written] != [_STUB_IS_MORE_EXACT[name]]
            is_bound, is_written = ([given for given, _ in signatures] for signatures in (is_bound, is_written))
        if is_bound != is_written:
            differences.append(f"{name}: bound is {is_bound}, the stub has {is_written}")
    assert not differences, "\n".join(differences)


@pytest.mark.slow
def test_stubtest_finds_no_difference(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed: tools/setup.sh test installs it")
    settings = tmp_path / "mypy.ini"
    settings.write_text(_STUBTEST_SETTINGS)
    allowed = tmp_path / "allowed.txt"
    package = Path(_C.__file__).parent.parent
    allowed.write_text(_allowed(package / "deeptide"))
    command = ["mypy.stubtest", "deeptide", "--concise", "--mypy-config-file", settings, "--allowlist", allowed]
    result = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "PYTHONPATH": str(package), "MYPYPATH": str(package)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
