# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`import deepspeed` as Deeptide's interface: found only where it is asked for, and whole in its names."""

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import deeptide

PACKAGE = os.path.dirname(os.path.dirname(deeptide.__file__))
ROOT = Path(__file__).resolve().parents[3]
SITE = os.path.join(PACKAGE, "deeptide", "as_deepspeed", "site-packages")


def run_python(code, *words, check=True, **variables):
    """Runs code in a fresh Python that finds this deeptide; returns the finished process."""
    environment = {key: value for key, value in os.environ.items() if key != "DEEPTIDE_AS_DEEPSPEED"}
    environment = {**environment, "PYTHONPATH": PACKAGE, **variables}
    command = [sys.executable, *words, *(["-c", textwrap.dedent(code)] if code else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done


def output_of(code, *words, **variables):
    return run_python(code, *words, **variables).stdout.strip()


VERSION = """
import importlib.metadata, deepspeed
metadata = importlib.metadata.metadata("deepspeed")
print(deepspeed.__version__ == metadata["Version"], metadata["Summary"])
"""
HONEST = "True Deeptide's interface under the name of deepspeed; this is not DeepSpeed"


def test_is_not_found_unless_asked_for():
    assert output_of("import importlib.util, deeptide; print(importlib.util.find_spec('deepspeed'))") == "None"


@pytest.mark.costly
def test_is_found_by_one_import():
    assert output_of("import deeptide.as_deepspeed\n" + VERSION) == HONEST


@pytest.mark.costly
def test_is_found_by_the_variable_where_deeptide_is_imported():
    assert output_of("import deeptide\n" + VERSION, DEEPTIDE_AS_DEEPSPEED="1") == HONEST
    code = "import importlib.util, deeptide; print(importlib.util.find_spec('deepspeed'))"
    assert output_of(code, DEEPTIDE_AS_DEEPSPEED="0") == "None"


@pytest.mark.costly
def test_is_found_by_the_module_that_starts_scripts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(VERSION + "import sys; print(sys.argv, __name__, sys.flags.utf8_mode)\n")
    words = ("-X", "utf8", "-m", "deeptide.as_deepspeed", str(script), "--x", "1")
    assert output_of("", *words) == f"{HONEST}\n['{script}', '--x', '1'] __main__ 1"
    assert output_of("", "-m", "deeptide.as_deepspeed", "--path") == SITE
    assert run_python("", "-m", "deeptide.as_deepspeed", check=False).returncode == 2


@pytest.mark.costly
def test_is_found_by_the_line_that_a_wheel_installs():
    """The file of the wheel, as Python's site module runs its line at every start."""
    line = (ROOT / "python" / "deeptide_as_deepspeed.pth").read_text()
    assert output_of(line + VERSION, DEEPTIDE_AS_DEEPSPEED="1") == HONEST
    assert output_of(line + "import sys; print('deeptide' in sys.modules)") == "False"


def test_is_found_by_children():
    code = """
        import deeptide.as_deepspeed, subprocess, sys
        subprocess.run([sys.executable, "-c", "import deepspeed; print(deepspeed.__file__)"], check=True)
    """
    assert output_of(code).startswith(SITE)


@pytest.fixture
def another(tmp_path):
    """A folder that holds another deepspeed."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("real = True\n")
    return f"{tmp_path}{os.pathsep}{PACKAGE}"


def test_leaves_another_deepspeed_alone(another):
    assert output_of("import deeptide, deepspeed; print(deepspeed.real)", PYTHONPATH=another) == "True"
    code = "import deeptide.as_deepspeed, deepspeed; print(hasattr(deepspeed, 'real'))"
    assert output_of(code, PYTHONPATH=another) == "False"


def test_refuses_to_stand_beside_another_deepspeed(another):
    done = run_python("import deepspeed, deeptide.as_deepspeed", check=False, PYTHONPATH=another)
    assert "ImportError: deepspeed was imported before from" in done.stderr
    assert "import deeptide.as_deepspeed first" in done.stderr


@pytest.mark.costly
def test_importing_it_loads_nothing_and_asks_for_no_device():
    code = """
        import deeptide.as_deepspeed, sys
        import deepspeed
        print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "transformers"}))
        from deepspeed import DeepSpeedEngine
        import torch
        print(torch.cuda.is_initialized(), torch.distributed.is_initialized())
    """
    assert output_of(code) == "[]\nFalse False"


@pytest.mark.costly
def test_what_scripts_use_at_start_loads_little_beyond_torch():
    """So that it takes as long as torch and a few milliseconds: no other package, and not torch's compiler."""
    code = """
        import sys, torch
        before = set(sys.modules)
        import deeptide.as_deepspeed, deepspeed
        deepspeed.initialize, deepspeed.DeepSpeedEngine, deepspeed.comm, deepspeed.zero.Init
        new = set(sys.modules) - before
        own = {name for name in new if name.split(".")[0] in ("deeptide", "deepspeed")}
        print(sorted(name for name in new - own if name.split(".")[0] not in sys.stdlib_module_names), len(own) < 80)
    """
    assert output_of(code) == "[] True"


# -- names: a Python of its own, since the interface stays in a process --------------------------------------------


@pytest.mark.costly
def test_every_name_of_the_table_is_there_or_says_why_not():
    code = """
        import deeptide.as_deepspeed, importlib
        from deeptide.as_deepspeed import NotSupportedError
        from deeptide.as_deepspeed.names.table import ALIASES, MODULES, Status
        for alias, module in ALIASES.items():
            assert importlib.import_module(alias) is importlib.import_module(module), alias
        checked = refused = 0
        for module, names in MODULES.items():
            found = importlib.import_module(module)
            assert set(found.__all__) <= set(dir(found)), module
            for name, entry in names.items():
                value = getattr(found, name)
                checked += 1
                if entry.status is not Status.refused:
                    continue
                refused += 1
                for use in (lambda: value(1, x=2), lambda: value.anything):
                    try:
                        use()
                    except NotSupportedError as error:
                        assert str(error) == f"{module}.{name} is not supported by Deeptide: {entry.note}", error
                        assert len(entry.note) > 10, name
                    else:
                        raise AssertionError(f"{module}.{name} was used")
                assert not isinstance(1, value)
        print(checked > 200, refused > 50)
    """
    assert output_of(code) == "True True"


# The imports of DeepSpeed's own test harness, Accelerate, Transformers, Lightning, PEFT and TRL.
IMPORTS = """
from deepspeed import DeepSpeedEngine, PipelineEngine, comm as dist
from deepspeed.accelerator import get_accelerator, is_current_accelerator_supported
from deepspeed.accelerator.real_accelerator import get_accelerator as again
from deepspeed.git_version_info import torch_info
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine as E
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
from deepspeed.utils import groups, logger, safe_get_full_grad, set_z3_leaf_modules
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
import deepspeed.comm, deepspeed.zero
import deepspeed
assert E is DeepSpeedEngine and again is get_accelerator
assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
assert deepspeed.runtime.zero.partition_parameters._orig_torch_arange(2).tolist() == [0, 1]
assert deepspeed.zero.GatheredParameters is deepspeed.runtime.zero.GatheredParameters
deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor = len
deepspeed.checkpointing.configure(mpu_=None, partition_activations=False)
assert deepspeed.checkpointing.is_configured()
deepspeed.utils.logging.logger.setLevel(30)
assert get_accelerator().device_name(1) in ("cpu", "cuda:1")
assert DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
print("imported")
"""


@pytest.mark.costly
def test_what_libraries_import_is_there():
    assert output_of("import deeptide.as_deepspeed\n" + IMPORTS) == "imported"


def test_an_unknown_name_is_an_attribute_error_that_names_the_page():
    code = """
        import deeptide.as_deepspeed, deepspeed
        print(hasattr(deepspeed, "no_such_name"), hasattr(deepspeed.utils, "__wrapped__"))
        try:
            deepspeed.runtime.no_such_name
        except AttributeError as error:
            print(error)
        try:
            import deepspeed.no_such_module
        except ModuleNotFoundError as error:
            print(error)
    """
    lines = output_of(code).splitlines()
    assert lines[0] == "False False"
    assert lines[1].startswith("deepspeed.runtime.no_such_name is not in Deeptide's interface of deepspeed 0.19.8")
    assert lines[2] == "No module named 'deepspeed.no_such_module'"


def test_the_launcher_switches_it_on(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, deepspeed; print(os.environ['RANK'], deepspeed.__file__)\n")
    command = ["deeptide", "--num_gpus", "2", "--no_rank_prefix", "--as-deepspeed", str(script)]
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()[::2]) == ["0", "1"]
    assert all(path.startswith(SITE) for path in done.stdout.split()[1::2])


def test_the_launcher_names_it_in_a_dry_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    command = ["deeptide", "--num_gpus", "1", "--dry-run", "--as-deepspeed", "--module", "train"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "-m deeptide.as_deepspeed -m train" in done.stdout
    assert "DEEPTIDE_AS_DEEPSPEED=1" in done.stdout


# -- what is written of it -----------------------------------------------------------------------------------------


def _tool(name):
    path = ROOT / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_the_names():
    tool = _tool("from_deepspeed")
    text = tool.PAGE.read_text()
    assert text == tool.page(text), "run `make docs` and commit docs/from-deepspeed.md"
    assert "| `GatheredParameters` | differs |" in text and "| `init_inference` | not here |" in text


@pytest.mark.costly
def test_the_wheel_is_the_interface_and_says_what_it_is(tmp_path):
    wheel = output_of("", "-m", "deeptide.as_deepspeed", "--wheel", str(tmp_path))
    site = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert output_of(VERSION + IMPORTS, PYTHONPATH=f"{site}{os.pathsep}{PACKAGE}") == f"{HONEST}\nimported"
    info = next(site.glob("*.dist-info"))
    for line in (info / "RECORD").read_text().splitlines():
        name, digest, size = line.split(",")
        if digest:
            data = (site / name).read_bytes()
            made = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={made}", str(len(data))), name
    assert "deepspeed = deeptide.as_deepspeed.commands:launch" in (info / "entry_points.txt").read_text()


@pytest.mark.costly
def test_one_step_installs_its_commands(tmp_path):
    pytest.importorskip("pip")
    run_python("", "-m", "deeptide.as_deepspeed", "--install", "--target", str(tmp_path), "--quiet")
    commands = {"deepspeed", "ds", "ds_bench", "ds_elastic", "ds_io", "ds_report", "ds_ssh", "dsr"}
    assert set(os.listdir(tmp_path / "bin")) == commands
    search = f"{tmp_path}{os.pathsep}{PACKAGE}"
    for command, word in (
        ("ds_ssh", "hostfile"),
        ("ds_elastic", "elasticity"),
        ("ds_io", "--folder"),
        ("ds_bench", ""),
    ):
        done = run_python("", str(tmp_path / "bin" / command), "--help", PYTHONPATH=search)
        assert "Usage: deeptide" in done.stdout and word in done.stdout, command


def test_the_step_leaves_a_real_deepspeed_alone(another, tmp_path):
    info = tmp_path / "deepspeed-0.19.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    done = run_python("", "-m", "deeptide.as_deepspeed", "--install", check=False, PYTHONPATH=another)
    assert done.returncode == 1 and "deepspeed 0.19.8 is installed, and this would take its place" in done.stderr


@pytest.mark.costly
def test_its_commands_become_the_launcher_and_the_doctor(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    code = f"""
        import sys, deeptide.as_deepspeed
        sys.argv[1:] = ["--num_gpus", "1", "--dry-run", {str(script)!r}]
        from deepspeed.launcher.runner import main
        main()
    """
    assert f"-m deeptide.as_deepspeed {script}" in output_of(code)
    script.write_text("raise SystemExit(3)")
    failing = code.replace('"--dry-run", ', "") + "\n        print('no')"
    done = run_python(failing, check=False)
    assert done.returncode != 0 and "no" not in done.stdout.split()


def test_a_program_that_asks_for_the_report_goes_on(tmp_path):
    code = "import deeptide.as_deepspeed; from deepspeed.env_report import main, cli_main; main(); print('trained')"
    report = output_of(code).splitlines()
    assert report[-1] == "trained" and any("torch" in line for line in report[:-1])
    assert output_of(f"import sys; sys.executable = ''; {code}", PATH=str(tmp_path)).splitlines() == [
        "the command `deeptide` is not in PATH; it comes with Deeptide's wheel",
        "trained",
    ]
