# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs `deeptide checkpoint export` for the layout that torch writes: folder out format tag."""

import os
import sys

from deeptide import checkpoint
from deeptide._C import CheckpointError, ConfigError


def main() -> None:
    """Prints the names of what was written; exits with 126 and one line on an error."""
    folder, out, layout, tag = sys.argv[1:]
    try:
        names = checkpoint.export(folder, out, layout, tag=tag or None)
    except (CheckpointError, ConfigError) as error:
        print(f"deeptide: {error}", file=sys.stderr)
        sys.exit(126)
    print("\n".join(os.path.join(out, name) for name in names))


if __name__ == "__main__":
    main()
