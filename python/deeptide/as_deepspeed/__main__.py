# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""python -m deeptide.as_deepspeed [-m] script [arguments]: Python, with `import deepspeed` finding this interface.

--install makes it, and the commands `deepspeed`, `ds_report` and others, a package of this environment.
"""

import os
import sys
from pathlib import Path

from deeptide.as_deepspeed import SITE

_USAGE = """usage: python -m deeptide.as_deepspeed [-m module | script] [arguments]
       python -m deeptide.as_deepspeed --path
       python -m deeptide.as_deepspeed --install [pip's options]
       python -m deeptide.as_deepspeed --wheel FOLDER"""


def main(words: list[str]) -> int | None:
    """Becomes the program that `words` name; --path prints the folder that belongs on PYTHONPATH.

    --install and --wheel make a package of the interface: see wheel.py.
    """
    if words == ["--path"]:
        print(SITE)
        return 0
    if words[:1] == ["--install"]:
        from deeptide.as_deepspeed.wheel import install

        return install(words[1:])
    if words[:1] == ["--wheel"] and len(words) == 2:
        from deeptide.as_deepspeed.wheel import build

        print(build(Path(words[1])))
        return 0
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        print(_USAGE, file=sys.stderr)
        return 2
    # The interpreter's own options stand before "-m deeptide.as_deepspeed".
    options = sys.orig_argv[1 : sys.orig_argv.index("-m")]
    return os.execv(sys.executable, [sys.executable, *options, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
