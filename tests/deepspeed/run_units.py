# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own unit tests, on Deeptide under its name: run_units.py <folder with tests/unit> [file…].

Prints for each file how many tests pass, and fails if fewer do than units.txt says. Needs pytest 7.2 to 8.3, hjson and
py-cpuinfo, as those tests do. The folder must hold no `deepspeed` beside `tests`.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = int(os.environ.get("FILE_SECONDS", "600"))


def expected() -> tuple[dict[str, int], set[str]]:
    """({file: how many of its tests pass at least}, the files of which all cases run)."""
    lines = (line.split("#")[0].split() for line in (HERE / "units.txt").read_text().splitlines())
    files = [words for words in lines if words]
    return {words[0]: int(words[1]) for words in files}, {words[0] for words in files if words[2:] == ["all"]}


def command_folder(folder: Path) -> str:
    """A folder with the command `deepspeed`, as the package of this interface has it."""
    code = "from deeptide.as_deepspeed.commands import launch; launch()"
    path = folder / "deepspeed"
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return str(folder)


def run(tests: Path, file: str, most: str, commands: str) -> tuple[dict[str, int], str]:
    """(how many tests ended how; the output). `most`: cases of a function that run; "": all."""
    variables = {
        "MOST": most,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "DS_DISABLE_REUSE_DIST_ENV": "1",
        "DS_UNITTEST_TIMEOUT": "60",
        "HF_HUB_OFFLINE": "1",
        "LOCAL_SIZE": "4",  # else tests of two ranks are skipped: the CPU counts as one device
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([commands, os.environ["PATH"]]),
        "PYTEST_ADDOPTS": "-p units_plugin -p no:cacheprovider -p no:xdist --color=no",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE)]),
    }
    command = [sys.executable, "-m", "deeptide.as_deepspeed", "-m", "pytest", "-q", "-ra", f"unit/{file}"]
    # In a group of its own: ranks of a file that takes too long end with it.
    child = subprocess.Popen(
        command,
        cwd=tests,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output = child.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        output = child.communicate()[0] + f"\nended after {LIMIT} s"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    lines = [line for line in plain.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", "".join(lines[-1:]))}, plain


def main(words: list[str]) -> int:
    """Runs the files; returns 1 if one passes less than it did."""
    if not words or not (Path(words[0]) / "tests" / "unit" / "common.py").exists():
        print(__doc__, file=sys.stderr)
        return 2
    least, whole = expected()
    worse = 0
    logs = Path(os.environ.get("LOGS", "."))
    folder = tempfile.TemporaryDirectory()
    commands = command_folder(Path(folder.name))
    for file in words[1:] or least:
        most = "" if file in whole else os.environ.get("MOST", "")
        counts, output = run(Path(words[0]) / "tests", file, most, commands)
        if "LOGS" in os.environ:
            (logs / f"{file.replace('/', '_')}.log").write_text(output)
        passed = counts.pop("passed", 0)
        fewer = passed < least.get(file, 0)
        worse += fewer
        others = ", ".join(f"{count} {word}" for word, count in counts.items())
        note = f"  FEWER than {least[file]}" if fewer else ""
        print(f"{file}: {passed} passed{', ' if others else ''}{others}{note}", flush=True)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
