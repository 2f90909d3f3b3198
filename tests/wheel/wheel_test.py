# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A wheel on a machine that has this Python and torch and nothing else of ours: it installs, imports and trains.

Run as: wheel_test.py <wheel>, by the Python of an environment that has torch. `make test-wheel` builds the wheel too.
"""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import unittest
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path()
STEPS = 6
# The libraries that every Linux system has that runs this Python, by manylinux's list.
SYSTEM = re.compile(
    r"(ld-linux-x86-64|ld-linux-aarch64|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so(\.\d+)*"
)
TORCH = re.compile(r"lib(c10|torch|torch_cpu|torch_cuda|torch_python|c10_cuda)\.so")
# The packages that are there already: all of this environment's, but none of ours and nothing that runs by itself.
NOT_THERE = re.compile(r"_?deeptide|__pycache__|.*\.pth$")

LORA = """
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
text = torch.tensor(list(open(__file__, "rb").read()))
rows = [{"input_ids": row, "labels": row} for row in text.unfold(0, 32, 4)]
config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3},
}
arguments = TrainingArguments(
    output_dir="out", deepspeed=config, per_device_train_batch_size=4, learning_rate=1e-2, max_steps=8,
    logging_steps=2, save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True,
)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
Trainer(model=model, args=arguments, train_dataset=rows).train(resume_from_checkpoint="again" in sys.argv)
"""
GENERATE = """
import torch
from transformers import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained("out/model")
tokens = torch.tensor([list(open("train.py", "rb").read(64))])
assert model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0).shape[1] == 72
print(float(model(input_ids=tokens, labels=tokens).loss))
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(64, 8)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for epoch in range(3):
    for x, y in data:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
assert losses[-1] < losses[0] / 2, losses
stage = accelerator.state.deepspeed_plugin.zero_stage
print(f"rank {accelerator.process_index} of {accelerator.num_processes} at stage {stage}: learned", flush=True)
"""
ACCELERATE_LAUNCH = ("accelerate.commands.accelerate_cli", "launch")


class Wheel(unittest.TestCase):
    """One environment for all tests: made once, it takes seconds."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory(prefix="deeptide-wheel-")
        cls.addClassCleanup(cls.folder.cleanup)
        prefix = Path(cls.folder.name) / "env"
        venv.create(prefix)
        cls.bin = prefix / "bin"
        cls.packages = Path(cls.run_in("python", "-c", "import site; print(site.getsitepackages()[0])").strip())
        for entry in Path(site.getsitepackages()[0]).iterdir():
            if not NOT_THERE.match(entry.name):
                (cls.packages / entry.name).symlink_to(entry)
        cls.run_in("python", "-m", "pip", "install", "--quiet", "--no-index", str(WHEEL))

    @classmethod
    def folder_of(cls, name: str, files: dict[str, str]) -> Path:
        folder = Path(cls.folder.name) / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        return folder

    @classmethod
    def run_in(cls, program: str, *args: str, folder: Path | None = None) -> str:
        """Runs a program of the environment with no variable and no folder of this tree; returns its output."""
        variables = {"PATH": f"{cls.bin}:/usr/bin:/bin", "HOME": cls.folder.name, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [cls.bin / program, *args],
            env=variables,
            cwd=folder or cls.folder.name,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        if done.returncode:
            raise AssertionError(f"{program} {' '.join(args)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def binaries(self) -> list[Path]:
        """Every ELF file that the wheel installed."""
        installed = [self.bin / "deeptide", *(self.packages / "deeptide").rglob("*.so*")]
        self.assertGreaterEqual(len(installed), 3, "the command, the library and the module")
        return installed

    def test_command_runs(self) -> None:
        version = re.search(
            r"VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8").split("project(")[1]
        )
        self.assertIn(version[1], self.run_in("deeptide", "--version"))

    def test_package_imports_from_the_environment(self) -> None:
        place = self.run_in("python", "-c", "import deeptide; deeptide.initialize; print(deeptide.__file__)")
        self.assertTrue(Path(place.strip()).is_relative_to(self.packages), place)

    def test_metadata_says_what_it_is_for(self) -> None:
        code = "import importlib.metadata as m, json; print(json.dumps(m.metadata('deeptide').json))"
        metadata = json.loads(self.run_in("python", "-c", code))
        self.assertIn("deepspeed", " ".join(metadata["keywords"]))
        self.assertIn("Programming Language :: Python :: {}.{}".format(*sys.version_info), metadata["classifier"])
        self.assertEqual(metadata["license_expression"], "Apache-2.0")
        self.assertEqual(set(metadata["provides_extra"]), {"deepspeed", "hf", "lightning"})
        always = [each for each in metadata["requires_dist"] if "extra ==" not in each]
        self.assertEqual([re.split(r"[=~]", each)[0].strip() for each in always], ["torch", "numpy"])
        citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
        self.assertIn(f"\nversion: {metadata['version']}\n", citation)

    def test_extra_of_deepspeed_brings_its_commands(self) -> None:
        """From a folder with both wheels, as README writes it; the extra can be met by ours alone."""
        wheels = Path(self.folder.name) / "wheels"
        self.run_in("python", "-m", "deeptide.as_deepspeed", "--install")  # leaves what a wheel is made of
        self.run_in("python", "-m", "deeptide.as_deepspeed", "--wheel", str(wheels))
        shutil.copy(WHEEL, wheels)
        self.run_in(
            *("python", "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)),
            "deeptide[deepspeed]",
        )
        self.assertIn("torch", self.run_in("ds_report"))
        self.assertIn("usage", self.run_in("deepspeed", "--help").lower())

    def test_binaries_need_only_the_system_torch_and_each_other(self) -> None:
        own = {path.name for path in self.binaries()}
        for path in self.binaries():
            with self.subTest(path.name):
                dynamic = subprocess.run(["readelf", "-dW", path], check=True, capture_output=True, text=True).stdout
                needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
                strangers = [n for n in needed if n not in own and not SYSTEM.fullmatch(n) and not TORCH.fullmatch(n)]
                self.assertEqual(strangers, [], "a machine without our packages lacks these")
                self.assertNotIn(str(ROOT), dynamic, "the path of the tree that built it")

    def test_loader_finds_its_libraries_inside(self) -> None:
        own = {path.name for path in self.binaries()}
        for path in self.binaries():
            with self.subTest(path.name):
                found = subprocess.run(["ldd", path], check=True, capture_output=True, text=True, env={}).stdout
                self.assertNotIn("not found", found)
                for name, place in re.findall(r"(\S+) => (\S+)", found):
                    if name in own or TORCH.fullmatch(name):
                        self.assertTrue(
                            Path(os.path.normpath(place)).is_relative_to(self.bin.parent), f"{name}: {place}"
                        )

    def test_libraries_find_the_interface_of_deepspeed(self) -> None:
        code = (
            "import deeptide.as_deepspeed; import importlib.metadata as m; import deepspeed; "
            "print(m.version('deepspeed') == deepspeed.__version__, m.metadata('deepspeed')['Name'])"
        )
        self.assertEqual(self.run_in("python", "-c", code).strip(), "True deepspeed")

    def test_the_trainer_page_runs_as_it_stands(self) -> None:
        """docs/trainer.md, in a folder of its own: Transformers and Accelerate see an installed deepspeed."""
        page = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
        folder = Path(self.folder.name)
        blocks = dict(re.findall(r"```(json|python)\n(.*?)```", page, re.DOTALL))
        (folder / "ds_config.json").write_text(blocks["json"], encoding="utf-8")
        (folder / "train.py").write_text(blocks["python"], encoding="utf-8")
        launch = ("deeptide", "--as-deepspeed", "--num_ranks", "2", "--python", str(self.bin / "python"))
        output = self.run_in(*launch, "train.py")
        losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", output)]
        self.assertEqual(len(losses), 4, output)
        self.assertLess(losses[-1], losses[0] - 1, output)
        self.assertTrue((folder / "out" / "checkpoint-40" / "latest").exists(), output)
        said = self.run_in("python", "-c", GENERATE, folder=folder)
        losses = re.findall(r"^([0-9.]+)$", said, re.MULTILINE)  # bars and warnings stand beside it
        self.assertEqual(len(losses), 1, said)
        self.assertLess(float(losses[0]), 3.2, "the saved model knows what training taught it")

    def test_trainer_with_lora_goes_on_from_a_checkpoint(self) -> None:
        """The frozen base is gathered at stage 3, and checkpoints are read by a second process."""
        folder = self.folder_of("lora", {"train.py": LORA})
        launch = ("deeptide", "--as-deepspeed", "--quiet", "--num_ranks", "2", "--python", str(self.bin / "python"))
        straight = self.run_in(*launch, "train.py", folder=folder)
        shutil.rmtree(folder / "out" / "checkpoint-8")
        resumed = self.run_in(*launch, "train.py", "again", folder=folder)
        losses = [re.findall(r"'loss': '?([0-9.]+)", output) for output in (straight, resumed)]
        self.assertEqual(len(losses[0]), 4, straight)
        self.assertEqual(losses[1], losses[0][2:], resumed)
        self.assertTrue((folder / "out" / "checkpoint-8" / "adapter_model.safetensors").exists(), resumed)

    def test_accelerate_launches(self) -> None:
        config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
        folder = self.folder_of("accelerate", {"train.py": ACCELERATE, "ds_config.json": json.dumps(config)})
        options = ("--num_processes", "2", "--use_deepspeed", "--deepspeed_config_file", "ds_config.json")
        self.run_in("python", "-m", "deeptide.as_deepspeed", "--install")  # accelerate's command looks for it, too
        output = self.run_in("python", "-m", *ACCELERATE_LAUNCH, *options, "train.py", folder=folder)
        self.assertEqual(sorted(re.findall(r"rank (\d) of 2 at stage 3: learned", output)), ["0", "1"], output)

    def test_plan_needs_no_model(self) -> None:
        folder = self.folder_of(
            "plan", {"ds_config.json": '{"train_batch_size": 8, "zero_optimization": {"stage": 3}}'}
        )
        output = self.run_in(
            *("deeptide", "plan", "--config", "ds_config.json", "--params", "7B", "--layers", "32", "--num_ranks", "8"),
            folder=folder,
        )
        self.assertRegex(output, r"optimizer states +[0-9.,]+ +[KMG]iB")

    def test_quickstart_trains(self) -> None:
        quickstart = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
        folder = self.folder_of("quickstart", {"quickstart.py": quickstart})
        launch = ("deeptide", "--quiet", "--num_ranks", "2", "--python", str(self.bin / "python"))
        losses = [
            float(x) for x in re.findall(r"loss ([0-9.e-]+)", self.run_in(*launch, "quickstart.py", folder=folder))
        ]
        self.assertEqual(len(losses), 10)
        self.assertLess(losses[-1], losses[0] / 2)

    def test_demo_trains(self) -> None:
        gpt = ROOT / "examples" / "gpt"
        out = Path(self.folder.name) / "out"
        launch = ("deeptide", "--quiet", "--num_ranks", "2", "--python", str(self.bin / "python"), str(gpt / "gpt.py"))
        options = (
            "--config",
            str(gpt / "ds_config_fp32.json"),
            "--out",
            str(out),
            "--steps",
            str(STEPS),
            "--print-losses",
        )
        self.run_in(*launch, *options)
        lines = [json.loads(line) for line in (out / "losses.jsonl").read_text(encoding="utf-8").splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        self.assertEqual(len(losses), STEPS)
        self.assertLess(losses[-1], losses[0] - 0.1, "the loss of byte-level text falls from the first steps on")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
