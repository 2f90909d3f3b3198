# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Examines a Python interpreter for `deeptide doctor`: prints one line per finding, with four fields separated by tabs.

CMake embeds this file into the command, which runs it with `python -c`.
"""

import sys


def say(verdict, subject, text, cure=""):
    print(verdict, subject, text, cure, sep="\t", flush=True)


def judge(good, subject, cure):
    if good:
        say("ok", subject, "available")
    else:
        say("fail", subject, "is not in this build of torch", cure)


def examine_collectives(kind):
    import torch.distributed as dist

    judge(dist.is_available(), "torch.distributed", "install a build of torch with USE_DISTRIBUTED")
    if not dist.is_available():
        return
    judge(dist.is_gloo_available(), "gloo", "install a build of torch with Gloo")
    if kind == "cuda":
        judge(dist.is_nccl_available(), "nccl", "install a CUDA build of torch")
    else:
        say("ok", "nccl", "available" if dist.is_nccl_available() else "not in this build of torch; only GPUs need it")
    absent = "not in this build of torch; ranks under mpirun use Gloo or NCCL"
    say("ok", "mpi", "available" if dist.is_mpi_available() else absent)


def examine_deeptide():
    try:
        import deeptide
        import deeptide._C

        say("ok", "deeptide", f"{deeptide.__version__} at {deeptide.__path__[0]}")
        targets = deeptide._C.kernel_targets()
        say("ok", "kernels of deeptide", ", ".join(f"{kind} on {target}" for kind, target in targets.items()))
    except Exception as error:
        say("fail", "deeptide", f"does not load: {error}", "pip install deeptide here, built for this torch")


def main():
    say("ok", "python", sys.version.split()[0] + " at " + sys.executable)
    try:
        import torch
    except Exception as error:
        cure = "pip install torch here, or choose another interpreter with --python"
        say("fail", "torch", f"does not load: {error}", cure)
        return
    say("ok", "torch", f"{torch.__version__} at {torch.__path__[0]}")
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    kind = torch.accelerator.current_accelerator().type if count else "cpu"
    say("ok", "devices", f"{count} x {kind}" if count else "none: training on the CPU")
    examine_collectives(kind)
    say("ok", "cpu kernels of torch", torch.backends.cpu.get_cpu_capability())
    examine_deeptide()


if __name__ == "__main__":
    main()
