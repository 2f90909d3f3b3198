#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times training steps over several hosts, beside DDP, FSDP2 and DeepSpeed; prints Markdown.

Hosts are network namespaces of this machine, and tc slows their links down: as root.
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import median

import output
from contenders import CONTENDERS
from jobs import Place, run_job
from links import address_of, slow_hosts
from report import round_seconds
from settings import SIZES

PORT = 29500  # each namespace has ports of its own
DEFAULT = ("floor", "torch", "exchange", "ddp", "fsdp2", "deeptide-0", "deeptide-1", "deeptide-2", "deeptide-3")
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LEGEND = """\
Each rank has one thread; each host is a network namespace whose link sends and receives at most at the rate given (tc's
token bucket). A round's step is the median over its steps of the slowest rank's time; shown are the best and the median
round, and the median of the ratios to DDP within a round. Processor: the processor time of a step, on all threads of
one rank, the busiest.

Ideal at stages 1 and 2: max(f, p / r) + max(c - f, g / r) + 2 u / r, where c is plain torch's step (forward,
backward, update; no communication), f = c / 3 its forward, r the rate (of the slowest link), p what a host must send of
the parameters, (H - 1) / H of them, which come after the update and are needed in forward, g as much of the gradients,
which backward makes, and u = (H - 1) / H of the first unit, which is reduced after backward and gathered before
forward: nothing hides it. At stage 3 backward gathers anew what is not kept from forward: g has 3/4 of the parameters
more, since a quarter may stay gathered (stage3_max_live_parameters is not given). At stage 0 and in DDP every rank
steps all, so gradients go out and their sums, in fp32, come back, between forward and the update:
f + max(c - f, b / r) + u / r for each of the two, where b is both.

Ideal of one core per rank: a rank that has one core for everything also moves the bytes with it, so c is greater by the
processor time of "exchange", which sends and receives b from memory to memory and does nothing else."""


def bits_per_second(rate):
    for unit, factor in BITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise argparse.ArgumentTypeError(f"got {rate}, expected a number with one of {', '.join(BITS)}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=[name for name, size in SIZES.items() if size.heads], default="46m")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "8gbit"], help="of the links, as tc writes them")
    parser.add_argument("--last-rate", metavar="RATE", help="of the last host's link, which all others wait for")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="per host")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(DEFAULT), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="fresh jobs of each contender")
    parser.add_argument("--steps", type=int, default=6, help="timed steps in a job")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps before them")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a job")
    parser.add_argument("--deeptide", type=Path, default=output.ROOT / "build" / "python", help="folder to import from")
    output.add_arguments(parser, "bench-hosts")
    options = parser.parse_args()
    for rate in (*options.rates, *filter(None, [options.last_rate])):
        bits_per_second(rate)
    return options


# -- the jobs ---------------------------------------------------------------------------------------------------------


def places(names, ranks):
    """The place of each rank, host by host."""
    environment = {
        "MASTER_ADDR": address_of(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0",
        "LOCAL_WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks),
    }  # fmt: skip
    return [
        Place(("ip", "netns", "exec", name), environment | {"LOCAL_RANK": str(local)})
        for name in names
        for local in range(ranks)
    ]


def run_rounds(options):
    """Yields a job at a time, every other round backwards, so that drift does not favour anyone."""
    schedule = [(rate, name) for rate in options.rates for name in options.only]
    for number in range(1, options.rounds + 1):
        for rate, name in schedule if number % 2 else reversed(schedule):
            with slow_hosts(rate, options.hosts, options.last_rate) as names:
                outcome = run_job(name, options.precision, "default", options, places(names, options.ranks))
            said = f"{round_seconds(outcome):.3f} s" if "ranks" in outcome else outcome.get("error", "skipped")
            print(f"round {number}, {rate}, {name}: {said}", file=sys.stderr, flush=True)
            yield {"round": number, "rate": rate, "contender": name} | outcome


# -- the report -------------------------------------------------------------------------------------------------------


def ideal_seconds(options, rate, compute, moving, stage):
    """`moving`: what the same core needs to exchange the bytes of ZeRO-2."""
    size, spread = SIZES[options.model], (options.hosts - 1) / options.hosts
    item = 4 if options.precision == "fp32" else 2
    per_layer = 12 * size.width**2 + 13 * size.width
    first_unit = (size.vocabulary + size.context) * size.width
    elements = size.layers * per_layer + first_unit + 2 * size.width + size.vocabulary * size.width
    in_forward = 0 if stage == 0 else item  # bytes of each element
    in_backward = {0: item + 4, 2: item, 3: 1.75 * item}[stage]
    per_second = bits_per_second(options.last_rate or rate) / 8 / spread

    def phase(computes, bytes_each):
        moves = moving * bytes_each / (2 * item)
        return max(computes + moves, elements * bytes_each / per_second)

    nothing_hides = first_unit * (item + 4 if stage == 0 else 2 * item) / per_second
    return phase(compute / 3, in_forward) + phase(compute * 2 / 3, in_backward) + nothing_hides


def stage_of(name):
    if name in ("torch", "exchange"):
        return None
    if name == "fsdp2" or name.endswith("-3"):
        return 3
    return 0 if name in ("ddp", "deeptide-0") else 2


def rows_of(options, rate, jobs):
    done = {}
    for job in jobs:
        if "ranks" in job and job["rate"] == rate:
            done.setdefault(job["contender"], {})[job["round"]] = job
    seconds = {name: {number: round_seconds(job) for number, job in of.items()} for name, of in done.items()}
    processor = {
        name: median(max(rank["processor_seconds"] for rank in job["ranks"]) for job in of.values())
        for name, of in done.items()
    }
    ideals, of_cores = {}, {}  # by stage
    if "torch" in seconds:
        compute = min(seconds["torch"].values())
        moving = processor.get("exchange", 0) * compute / processor["torch"]
        for stage, title in ((0, "stage 0"), (2, "stages 1 and 2"), (3, "stage 3")):
            ideals[stage] = ideal_seconds(options, rate, compute, 0, stage)
            of_cores[stage] = ideal_seconds(options, rate, compute, moving, stage)
            yield [f"ideal, {title}", f"{ideals[stage] * 1e3:.0f}", *[""] * 5]
            if moving:
                yield [f"ideal of one core per rank, {title}", f"{of_cores[stage] * 1e3:.0f}", *[""] * 5]
    for name in options.only:
        if name not in seconds:
            yield [name, "none ended", *[""] * 5]
            continue
        own, ddp, stage = seconds[name], seconds.get("ddp", {}), stage_of(name)
        ratios = [own[number] / ddp[number] for number in own if number in ddp]
        best = min(own.values())
        yield [
            name, f"{best * 1e3:.0f}", f"{median(own.values()) * 1e3:.0f}",
            f"{median(ratios):.2f}" if ratios else "",
            *(f"{best / ideal[stage]:.2f}" if stage in ideal else "" for ideal in (ideals, of_cores)),
            f"{processor[name] * 1e3:.0f}",
        ]  # fmt: skip


def markdown(options, record):
    title = f"{options.hosts} hosts x {options.ranks}, {options.model}, {options.precision}"
    if options.last_rate:
        title += f", the last host's link {options.last_rate}"
    parts = [output.head(title, record, LEGEND)]
    header = ["contender", "best (ms)", "median (ms)", "x DDP", "best / ideal", "of one core", "processor (ms)"]
    for rate in options.rates:
        parts += [f"## {rate}", "", output.table(header, rows_of(options, rate, record["jobs"]))]
    return "\n".join(parts)


def main():
    options = parse_arguments()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    record = output.new_record()
    record["jobs"] = list(run_rounds(options))
    output.write(options, markdown(options, record), record)
    sys.exit(int(any("error" in job for job in record["jobs"])))


if __name__ == "__main__":
    main()
