# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a wheel named `deepspeed` that holds Deeptide's interface of that name: tools/deepspeed_wheel.py [FOLDER].

For those who want `pip list` to show it. It takes the place of a real DeepSpeed in its environment, needs the wheel of
Deeptide itself, and belongs on no index.
"""

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "deeptide" / "as_deepspeed"
COMMANDS = """[console_scripts]
deepspeed = deeptide.as_deepspeed.commands:launch
ds_report = deeptide.as_deepspeed.commands:report
"""
WHEEL = """Wheel-Version: 1.0
Generator: deeptide
Root-Is-Purelib: true
Tag: py3-none-any
"""


def _match(pattern: str, path: Path) -> str:
    return re.search(pattern, path.read_text())[1]


def build(folder: Path) -> Path:
    """Writes the wheel into `folder`; returns its path."""
    deeptide = _match(r"project\(deeptide VERSION ([0-9.]+)", ROOT / "CMakeLists.txt")
    version = _match(r'INTERFACE_VERSION = "([0-9.]+)"', PACKAGE / "__init__.py") + f"+deeptide.{deeptide}"
    metadata = (PACKAGE / "METADATA.in").read_text()
    metadata = metadata.replace("@DEEPTIDE_AS_DEEPSPEED_VERSION@", version).replace("@PROJECT_VERSION@", deeptide)
    info = f"deepspeed-{version}.dist-info"
    files = {
        "deepspeed/__init__.py": (PACKAGE / "site-packages" / "deepspeed" / "__init__.py").read_text(),
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": WHEEL,
        f"{info}/entry_points.txt": COMMANDS,
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"deepspeed-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"))
