# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A wheel named `deepspeed` that holds this interface, for those who want its commands and `pip list` to show it.

It takes the place of a real DeepSpeed in its environment, needs the wheel of Deeptide itself, and belongs on no index.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from deeptide.as_deepspeed import SITE, VERSION

_COMMANDS = """[console_scripts]
deepspeed = deeptide.as_deepspeed.commands:launch
ds = deeptide.as_deepspeed.commands:launch
ds_bench = deeptide.as_deepspeed.commands:bench
ds_elastic = deeptide.as_deepspeed.commands:elastic
ds_io = deeptide.as_deepspeed.commands:io
ds_report = deeptide.as_deepspeed.commands:report
dsr = deeptide.as_deepspeed.commands:report
ds_ssh = deeptide.as_deepspeed.commands:ssh
"""
_WHEEL = """Wheel-Version: 1.0
Generator: deeptide
Root-Is-Purelib: true
Tag: py3-none-any
"""


def build(folder: Path) -> Path:
    """Writes the wheel into `folder`; returns its path."""
    site = Path(SITE)
    info = f"deepspeed-{VERSION}.dist-info"
    files = {
        **{str(path.relative_to(site)): path.read_text() for path in sorted((site / "deepspeed").rglob("*.py"))},
        f"{info}/METADATA": (site / f"deepspeed-{VERSION}.egg-info" / "PKG-INFO").read_text(),
        f"{info}/WHEEL": _WHEEL,
        f"{info}/entry_points.txt": _COMMANDS,
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"deepspeed-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def _real_version() -> str | None:
    """That of another package of this name, if there is one."""
    search = [entry for entry in sys.path if entry != SITE]
    found = [each.version for each in importlib.metadata.distributions(name="deepspeed", path=search)]
    return next((version for version in found if "+deeptide." not in version), None)


def install(options: list[str]) -> int:
    """Gives the wheel to pip, with options of pip's; returns its exit code. A real DeepSpeed is not replaced."""
    real = None if any(option.startswith("--target") for option in options) else _real_version()
    if real is not None:
        print(
            f"deepspeed {real} is installed, and this would take its place: run `pip uninstall deepspeed` first, or "
            "use `deeptide --as-deepspeed`, which leaves it alone",
            file=sys.stderr,
        )
        return 1
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        words = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall", *options]
        return subprocess.run([*words, str(wheel)], env=_without_interface(), check=False).returncode


def _without_interface() -> dict[str, str]:
    """This environment, where pip takes the metadata that we hold for no package: it would replace and delete it."""
    variables = {name: value for name, value in os.environ.items() if name != "DEEPTIDE_AS_DEEPSPEED"}
    folders = variables.pop("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(folder for folder in folders if folder and folder != SITE)
    return {**variables, "PYTHONPATH": kept} if kept else variables
