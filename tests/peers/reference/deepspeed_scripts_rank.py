# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of test_deepspeed_scripts.py: runs scripts under DeepSpeed, each in a process forked from this one.

Argument: a file with a list of cases, each a module, a function, its arguments and the port where its ranks meet.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import accelerate  # noqa: F401 - loaded once, before the forks
import deepspeed
import torch
import transformers.models.llama.modeling_llama
import transformers.trainer  # noqa: F401


def run(case):
    os.environ["MASTER_PORT"] = str(case["port"])
    torch.set_num_threads(1)
    try:
        getattr(importlib.import_module(case["module"]), case["function"])(*case["arguments"])
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main():
    assert not getattr(deepspeed, "__deeptide__", False), deepspeed.__file__
    assert Path(deepspeed.__file__).is_relative_to(Path(sys.prefix)), deepspeed.__file__
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print(f"-- {case['function']}{case['arguments']}", file=sys.stderr, flush=True)
        child = os.fork()
        if child == 0:
            code = run(case)
            sys.stderr.flush()
            os._exit(code)  # DeepSpeed's destructors wait for groups that are gone
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
