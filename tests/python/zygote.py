# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A process that has loaded torch and forks ranks: one starts in milliseconds, a new interpreter takes two seconds.

A forked rank is as a new one: the main thread of its process, nothing of torch used before, ending as a script does up
to its last exit handler. Then its own objects go, but not the modules, which would take a quarter of a second.
`Zygote` is the tests' side; run as a script, this file is the other.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading


class ForkedRank:
    """A rank with the methods of subprocess.Popen that the tests use."""

    def __init__(self, status, stdout, stderr):
        self._status, self._pipes = os.fdopen(status), (os.fdopen(stdout), os.fdopen(stderr))
        self.pid = int(self._status.readline())
        self.returncode = None

    def poll(self):
        return self.returncode

    def kill(self):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self):
        texts = ["", ""]
        readers = [
            threading.Thread(target=lambda i=i: texts.__setitem__(i, self._pipes[i].read()), daemon=True)
            for i in range(2)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self.returncode = int(self._status.readline())
        for file in (self._status, *self._pipes):
            file.close()
        return tuple(texts)


class Zygote:
    """Ends with this process: it reads the end of its socket then."""

    def __init__(self, environment, preload=()):
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            subprocess.Popen(
                [sys.executable, __file__, str(other.fileno()), *preload],
                env=environment,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def start(self, arguments, environment):
        """A rank whose sys.argv are the arguments; the first is the program's text, as for Python's -c."""
        reading, writing = zip(*(os.pipe() for _ in range(3)))
        request = json.dumps([arguments, environment]).encode()
        socket.send_fds(self._socket, [request], writing)
        for end in writing:
            os.close(end)
        return ForkedRank(*reading)


def serve(control):
    """Returns in each rank, with the arguments it is to run; in the zygote only when the tests have ended."""
    while True:
        request, files, _, _ = socket.recv_fds(control, 1 << 18, 3)
        if not request:
            os._exit(0)
        if os.fork() > 0:
            for file in files:
                os.close(file)
            continue
        # The rank's parent: tells its pid, waits for its end and tells how that was.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
        status, stdout, stderr = files
        rank = os.fork()
        if rank == 0:
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            for file in files:
                os.close(file)
            control.close()
            arguments, environment = json.loads(request)
            os.environ.clear()
            os.environ.update(environment)
            return arguments
        os.close(stdout)
        os.close(stderr)
        os.write(status, f"{rank}\n".encode())
        os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])}\n".encode())
        os._exit(0)


class Program:
    """The text that a rank runs; its constructor must be called before any module registers an exit handler."""

    def __init__(self):
        self._objects, self._code = {"__name__": "__main__"}, None
        atexit.register(self._end)

    def run(self, text):
        try:
            exec(compile(text, "<rank>", "exec"), self._objects)
            self._code = 0
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                self._code = end.code or 0
            raise
        except Exception:
            self._code = 1
            raise

    def _end(self):
        if self._code is None:
            return  # as the interpreter ends
        sys.last_type = sys.last_value = sys.last_traceback = None
        self._objects.clear()
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._code)


if __name__ == "__main__":
    program = Program()

    import torch
    import torch._dynamo
    import torch.distributed  # noqa: F401

    import deeptide  # noqa: F401

    for module in sys.argv[2:]:
        importlib.import_module(module)
    assert os.listdir("/proc/self/task") == [str(os.getpid())], "a process with threads must not fork"
    # Freezes what is loaded: the collections of ranks need not walk it and copy its pages.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks' parents
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    program.run(sys.argv[0])
