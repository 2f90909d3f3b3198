# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Imported by the server that forks the ranks of DeepSpeed's unit tests: failures in a rank become errors there.

pytest's Failed, of a raises() that saw nothing, is no Exception: it ends the pool's worker, and the test waits for its
limit. So does a rank in a barrier of torch for one that has failed, as by a refused name: the one that fails
closes its group, and the others' collectives fail.
"""

import pytest
import torch.distributed as dist
from unit.common import DistributedExec

_run = DistributedExec._dist_run


def _run_and_report(self, *args, **kwargs):
    try:
        return _run(self, *args, **kwargs)
    except pytest.fail.Exception as failure:
        _leave()
        raise AssertionError(str(failure)) from None
    except Exception:
        _leave()
        raise


def _leave():
    if dist.is_initialized():
        dist.destroy_process_group()


DistributedExec._dist_run = _run_and_report
