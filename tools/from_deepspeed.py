# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/from-deepspeed.md anew from the list of names; `make docs` runs it, a test compares."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "from-deepspeed.md"
BEGIN, END = "<!-- begin: written by tools/from_deepspeed.py -->\n", "<!-- end -->\n"


def _load(name: str) -> ModuleType:
    """A module of python/deeptide/as_deepspeed/names by its file: needs no build of the package."""
    path = ROOT / "python" / "deeptide" / "as_deepspeed" / "names" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"deeptide.as_deepspeed.names.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tables() -> str:
    """A table of each module's names, and one of the engine's methods that are not there."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("deeptide")}
    try:
        for part in ("entries", "features", "helpers"):
            _load(part)
        names = _load("table")
    finally:
        for name in [name for name in sys.modules if name.startswith("deeptide")]:
            del sys.modules[name]
        sys.modules.update(before)
    text = ""
    for module, entries in sorted(names.MODULES.items()):
        if not entries:
            continue
        text += f"\n### `{module}`\n\n"
        also = [alias for alias, target in sorted(names.ALIASES.items()) if target == module]
        if also:
            text += f"Also {', '.join(f'`{alias}`' for alias in also)}.\n\n"
        text += "| name | here | what differs, or what to do instead |\n|---|---|---|\n"
        rows = sorted(entries.items(), key=lambda item: item[0].lower())
        text += "".join(f"| `{name}` | {entry.status.value} | {entry.note} |\n" for name, entry in rows)
    text += "\n### Methods that the engine does not have\n\n| method | what to do instead |\n|---|---|\n"
    return text + "".join(f"| `{name}` | {note} |\n" for name, note in sorted(names.ENGINE.items()))


def page(text: str) -> str:
    """The page with its table written anew."""
    return re.sub(
        re.escape(BEGIN) + ".*" + re.escape(END), lambda _: BEGIN + tables() + "\n" + END, text, flags=re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
