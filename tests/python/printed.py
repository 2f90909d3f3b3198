# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Removes from programs' output what differs between torch's minor versions."""

import re
import subprocess

# The line that torch up to 2.10 prints on standard output for each connected group of Gloo's. The launcher may have
# put the rank before it.
GLOO = re.compile(r"^(\[[^]]*\] ?)?\[Gloo\] Rank \d+ is connected to .*\n", re.MULTILINE)


def own_output(text):
    """Without torch's lines."""
    return GLOO.sub("", text)


def own_line(stream):
    """The next line that is not torch's; "" at the end."""
    return next((line for line in iter(stream.readline, "") if own_output(line)), "")


def run_captured(command, **options):
    """subprocess.run with both outputs as text, the standard one without torch's lines."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    done.stdout = own_output(done.stdout)
    return done
