# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank's process of a drawn program: rank 0 runs plain torch first."""

import contextlib
import datetime
import faulthandler
import json
import os
import pickle
import sys
import traceback

import torch
import torch.distributed as dist

import deeptide
from drawn.sides import OnEngine, Plain

CALL = "import sys, json, drawn.rank; drawn.rank.main(*json.loads(sys.argv[1]))"


def _raised(error, at):
    """The text of the error, and the file in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    text = "".join(traceback.format_exception(error))[-2500:]
    return ("raised", type(error).__module__, type(error).__name__, str(error), frames[-1].filename, at, text)


def _result(make):
    side = None
    try:
        side = make()
        return "ok", side.run()
    except Exception as error:
        return _raised(error, getattr(side, "at", -1))


def main(program, rank, port, folder, limit):
    faulthandler.dump_traceback_later(limit, exit=True)
    torch.set_num_threads(1)
    program, size = json.loads(program), json.loads(program)["stages"] * json.loads(program)["tensor"]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    plain = _result(lambda: Plain(program)) if rank == 0 else None

    def make():
        world = deeptide.make_world(dist.PrefixStore(folder, store), rank, size)
        return OnEngine(program, world, os.path.join(folder, "saved"))

    result = _result(make)
    with open(os.path.join(folder, f"rank-{rank}.part"), "wb") as file, contextlib.suppress(OSError):
        pickle.dump((plain, result), file)
    os.rename(os.path.join(folder, f"rank-{rank}.part"), os.path.join(folder, f"rank-{rank}"))
    sys.stdout.flush()
    os._exit(0)
