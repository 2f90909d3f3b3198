# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`import deeptide.as_deepspeed` makes `import deepspeed` find Deeptide's interface; nothing else does by itself.

The folder `site-packages` beside this file holds that interface with metadata of its own. It is on no path until this
module, `deeptide --as-deepspeed` or DEEPTIDE_AS_DEEPSPEED=1 puts it there, so a real DeepSpeed stays what it is. Child
processes find the same as their parent.
"""

import os
import sys

from deeptide import __version__ as _deeptide_version

INTERFACE_VERSION = "0.19.8"  # of the interface that this one mirrors
VERSION = f"{INTERFACE_VERSION}+deeptide.{_deeptide_version}"
SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages")


class NotSupportedError(NotImplementedError):
    """Something of DeepSpeed's that is not here; the text says what to do instead."""


def path_with_site(path: str) -> str:
    """A value of PYTHONPATH that finds this interface before any other."""
    rest = [entry for entry in path.split(os.pathsep) if entry and entry != SITE]
    return os.pathsep.join([SITE, *rest])


def activate() -> None:
    """Makes `import deepspeed` find this interface, in this process and its children. Twice is once.

    Errors: ImportError if another deepspeed has been imported already.
    """
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and not getattr(loaded, "__deeptide__", False):
        raise ImportError(
            f"deepspeed was imported before from {getattr(loaded, '__file__', 'somewhere')}; import "
            "deeptide.as_deepspeed first, or start the program with `deeptide --as-deepspeed`"
        )
    if SITE not in sys.path:
        sys.path.insert(0, SITE)
    os.environ["PYTHONPATH"] = path_with_site(os.environ.get("PYTHONPATH", ""))
    os.environ["DEEPTIDE_AS_DEEPSPEED"] = "1"


activate()
