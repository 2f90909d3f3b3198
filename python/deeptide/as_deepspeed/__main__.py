# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""python -m deeptide.as_deepspeed [-m] script [arguments]: Python, with `import deepspeed` finding this interface."""

import os
import sys

from deeptide.as_deepspeed import SITE

_USAGE = "usage: python -m deeptide.as_deepspeed [--path] | [-m module | script] [arguments]"


def main(words: list[str]) -> int | None:
    """Becomes the program that `words` name; --path prints the folder that belongs on PYTHONPATH."""
    if words == ["--path"]:
        print(SITE)
        return 0
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        print(_USAGE, file=sys.stderr)
        return 2
    # The interpreter's own options stand before "-m deeptide.as_deepspeed".
    options = sys.orig_argv[1 : sys.orig_argv.index("-m")]
    return os.execv(sys.executable, [sys.executable, *options, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
