# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Messages and times of a tree of agents, by discrete-event simulation: the figures of docs/scale.md.

Each agent starts up to `fanout` others over ssh, one after the other on its own processor (`--fork`), all handshakes at
once (`--ssh`); each message takes `--latency` on the way and `--work` on the processor that takes it. Simulated: the
start (agents up, hello gathered upwards, plan downwards), one period of heartbeats, and a rank's failure to the end of
the last agent (report up, stop down, done up). Fanout 0 is today's star: the launcher speaks with all.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import dataclass, field


@dataclass
class Costs:
    ssh: float
    fork: float
    latency: float
    work: float


@dataclass
class Tree:
    parent: list[int]
    children: list[list[int]] = field(default_factory=list)

    @staticmethod
    def of(agents: int, fanout: int) -> Tree:
        """Node 0 is the launcher, then the agents in the order of breadth."""
        parent = [-1] + [(node - 1) // fanout if fanout else 0 for node in range(1, agents + 1)]
        tree = Tree(parent, [[] for _ in parent])
        for node in range(1, len(parent)):
            tree.children[parent[node]].append(node)
        return tree

    def depth(self) -> int:
        node, depth = len(self.parent) - 1, 0
        while node:
            node, depth = self.parent[node], depth + 1
        return depth


class Simulation:
    """Events in the order of time; each node's processor takes one piece of work after the other."""

    def __init__(self, tree: Tree, costs: Costs):
        self.tree, self.costs = tree, costs
        self.free = [0.0] * len(tree.parent)
        self.handled = [0] * len(tree.parent)
        self.messages, self.now, self.sequence = 0, 0.0, 0
        self.events: list = []

    def at(self, time, action, node):
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, action, node))

    def work(self, node, seconds):
        """When `node` will have done `seconds` of work that may begin now."""
        self.free[node] = max(self.free[node], self.now) + seconds
        return self.free[node]

    def send(self, sender, receiver, action):
        self.messages += 1
        self.at(self.work(sender, self.costs.work) + self.costs.latency, lambda n: self.take(n, action), receiver)

    def take(self, node, action):
        self.handled[node] += 1
        self.at(self.work(node, self.costs.work), action, node)

    def run(self):
        while self.events:
            self.now, _, action, node = heapq.heappop(self.events)
            action(node)
        return self.now

    def down(self, node, at_leaf):
        """A message to all below `node`; `at_leaf` runs on each node that has it."""
        for child in self.tree.children[node]:
            self.send(node, child, lambda n: (self.down(n, at_leaf), at_leaf(n)))

    def up(self, waiting, node, at_root):
        """One message of each node when it and all below it are ready, added up on the way."""
        waiting[node] -= 1
        if waiting[node] >= 0:
            return
        if node == 0:
            at_root()
        else:
            self.send(node, self.tree.parent[node], lambda parent: self.up(waiting, parent, at_root))

    def counts(self):
        return [len(children) for children in self.tree.children]


def start(tree, costs):
    sim = Simulation(tree, costs)
    waiting = sim.counts()

    def spawn(node):
        for child in tree.children[node]:
            sim.at(sim.work(node, costs.fork) + costs.ssh, begin, child)
        sim.up(waiting, node, lambda: sim.down(0, lambda n: None))

    def begin(node):
        spawn(node)

    spawn(0)
    return sim.run(), sim


def end_after_failure(tree, costs):
    """The last agent's rank fails: its report climbs, the stop descends, done is gathered."""
    sim = Simulation(tree, costs)
    waiting = sim.counts()

    def report(node):
        if node:
            sim.send(node, tree.parent[node], report)
            return
        sim.up(waiting, 0, lambda: None)
        sim.down(0, lambda n: sim.up(waiting, n, lambda: None))

    report(len(tree.parent) - 1)
    return sim.run(), sim


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 8, 64, 512, 4096, 16384])
    parser.add_argument("--fanout", type=int, nargs="+", default=[0, 8, 16, 32, 64, 128])
    parser.add_argument("--ssh", type=float, default=0.15, help="seconds of one ssh handshake")
    parser.add_argument("--fork", type=float, default=0.004, help="processor seconds to start one ssh")
    parser.add_argument("--latency", type=float, default=0.0002, help="seconds of one message on the way")
    parser.add_argument("--work", type=float, default=0.00002, help="processor seconds to send or take one message")
    args = parser.parse_args()
    costs = Costs(args.ssh, args.fork, args.latency, args.work)
    columns = ("agents", "fanout", "depth", "start s", "messages", "root takes", "end s", "messages", "beats/s at root")
    print("| " + " | ".join(columns) + " |\n|" + "---:|" * len(columns))
    for agents in args.agents:
        for fanout in args.fanout:
            if fanout and fanout >= agents > 1:
                continue
            tree = Tree.of(agents, fanout)
            start_s, started = start(tree, costs)
            end_s, ended = end_after_failure(tree, costs)
            beats = 2 * len(tree.children[0]) * 2  # one each way every half second
            row = (agents, fanout or "star", tree.depth(), f"{start_s:.2f}", started.messages, started.handled[0])
            print("| " + " | ".join(map(str, (*row, f"{end_s:.4f}", ended.messages, beats))) + " |")


if __name__ == "__main__":
    main()
