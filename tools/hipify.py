# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Translates a kernel and its headers for hipcc with torch's hipify: hipify.py <src> <name>.cu <folder> <object>.

Writes <folder>/<name>.hip, with all that it includes beside it, and <object>.d, which names what they were made from.
"""

import contextlib
import io
import re
import shutil
import sys
from pathlib import Path

from torch.utils.hipify import hipify_python

INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


def included(src: Path, name: str, found: dict[str, None]) -> dict[str, None]:
    """The file and what it includes of ours, each once."""
    if name not in found:
        found[name] = None
        for other in INCLUDE.findall((src / name).read_text()):
            included(src, other, found)
    return found


def main() -> None:
    src, name, folder, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]).resolve(), sys.argv[4]
    names = included(src, name, {})
    shutil.rmtree(folder, ignore_errors=True)
    for each in names:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(src / each, folder / each)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        hipify_python.hipify(
            project_directory=str(folder),
            output_directory=str(folder),
            includes=[f"{folder}/*"],
            header_include_dirs=[str(folder)],
            is_pytorch_extension=True,
            show_progress=False,
        )
    if not (folder / name).with_suffix(".hip").exists():
        sys.exit(f"hipify.py: torch's hipify made no {name} for hipcc:\n{said.getvalue()}")
    Path(f"{target}.d").write_text(f"{target}: {' '.join(str(src / each) for each in names)}\n")


main()
