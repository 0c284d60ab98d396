"""`python -m tests.soak_under_faults` (make soak): every kind of request for many minutes, while processes are killed and stopped.

Two replicas of a tiny random target with all drafters. Readers stream through the gateway, and each must get the text
of the undisturbed replica; visitors come to the replicas directly, cancel, are slow, late or wrong, and may get an
error where a process was lost. Callers go through a second gateway, a process that is hurt like the others: each call
ends with its text, or with one clear error near that gateway's loss, and the harness starts it again as Kubernetes
would. One process at a time is killed (SIGKILL) or stopped (SIGSTOP), of each kind in turn,
and between two of these a replica restarts behind a drain with its deployment file, in which drafters and limits have
changed. The whole
`tritonserver` is hurt on the first replica alone, so that whatever grows in the second one has time to, until the
launcher restarts that Triton (launcher.watchdog).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from launcher import Server
from launcher.drain import LauncherClient
from tests.failover import LETTERS, SAMPLINGS, Case, Readers, ask_all, pid_of
from tests.support.clients import ask, metric, until
from tests.support.footprints import Footprints, Sample, growth, table
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.heads import make_head, make_target
from tests.support.supervised_gateway import Call, Callers, SupervisedGateway
from tests.support.visitors import Visit, Visitors

METHODS = (
    "none", "auto", "prompt_lookup", "suffix", "ngram", "lookahead", "recycling", "jacobi", "draft_model", "medusa", "eagle",
    "eagle2", "eagle3", "redrafter", "prompt_lookup+eagle2", "medusa+eagle3", "suffix+draft_model",
)  # fmt: skip
LENGTHS = (1, 20, 60, 150)
HEADS = ("medusa", "eagle", "eagle3", "redrafter")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
RELOAD = "reload"
GATEWAY = "gateway"
#: All processes of a replica whose drafters are in that of `target`.
KINDS = ("tritonserver", "target", "speculative", "speculative_unary")
NUM_READERS, NUM_CALLERS, NUM_VISITORS = 6, 2, 4
#: What each client waits between two requests: a replica that loads its models beside a full load takes a minute.
THINK_S = 0.5
HANG_LIMIT_S = 4.0
HEAL_LIMIT_S = 300.0
#: How long after a fault's end a request may still feel it: its answer, or its client's limit, comes so much later.
AFTERMATH_S = 45.0
#: How soon at the latest a launcher whose Triton is worn out replaces it, once the clients have stopped.
REST_S = 5.0
#: The launcher looks twice a second, and says so when it starts a Triton again: so long after its end at most.
NOTICE_S = 2.0
#: Preemptions need pools that the requests fill.
SERVING = """target = "target"
medusa = "medusa"
eagle = "eagle"
eagle3 = "eagle3"
redrafter = "redrafter"
kv_memory_mb = 1
max_waiting = 256
"""
#: What the reloads of a replica change, by turns; no request needs more than the smaller limits.
SETTINGS = (
    'draft = "draft"\nmax_running = 16\nmax_nodes = 128\nremember_tokens = 2000\n',
    'draft = "draft2"\nmax_running = 12\nmax_nodes = 64\nremember_tokens = 1000\n',
)


class Layout(NamedTuple):
    """What a replica consists of.

    kinds: its processes. serving: its deployment file. settings: the rest of that file, which reloads change, by turns.
    ready_limit_s: how long its models may take to load on a busy machine.
    """

    kinds: Sequence[str]
    serving: str
    settings: Sequence[str]
    ready_limit_s: float


IN_TARGET = Layout(KINDS, SERVING, SETTINGS, 90.0)
OWN_PROCESSES = Layout(
    (*KINDS, "draft", *HEADS),
    f'{SERVING}placement = "separate"\ndraft = "draft"\n',
    ("max_running = 16\nremember_tokens = 2000\n", "max_running = 12\nremember_tokens = 1000\n"),
    HEAL_LIMIT_S,
)


class Fault(NamedTuple):
    """A process that was killed or stopped.

    replica: −1 for the gateway. healed_s: from the signal to the next token of the replica, or of the gateway.
    """

    kind: str
    way: str
    replica: int
    began_s: float
    healed_s: float


class Reload(NamedTuple):
    """A reload that a replica was asked for. said: the answer. took_s: until it came."""

    replica: int
    began_s: float
    took_s: float
    status: int
    said: str


class End(NamedTuple):
    """A Triton that a signal has ended, ours or its own, or that the launcher has replaced as worn out (is_planned)."""

    replica: int
    at_s: float
    is_planned: bool = False


@dataclass
class Chaos:
    """The replicas, and what was done to them."""

    servers: Sequence[Server]
    gateway: SupervisedGateway
    ends: list[End]
    faults: list[Fault] = field(default_factory=list)
    reloads: list[Reload] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_supervised: int = 0
    layout: Layout = IN_TARGET

    def reload(self, replica: int) -> Reload:
        """Change a replica's deployment file and let its launcher reload it, as `make reload` does, under requests.

        It must be taken over, unless the replica's Triton has ended by itself or was replaced meanwhile.
        """
        server = self.servers[replica]
        until(lambda: self.is_well(server), f"replica {replica}", HEAL_LIMIT_S)
        earlier = [each for each in self.reloads if each.replica == replica]
        write_settings(server.config_path, len(earlier) + 1, self.layout)
        began_s = time.monotonic()
        launcher = LauncherClient(server.host, server.ports.health)
        status, said = launcher.request("PUT", "/reload", HEAL_LIMIT_S)
        done = Reload(replica, began_s, time.monotonic() - began_s, status, said)
        self.reloads.append(done)
        # After one that was not taken over, the file may be again what the processes have.
        is_taken = status == 200 and ("->" in said or any(each.status != 200 for each in earlier))
        has_ended = any(end.replica == replica and end.at_s >= began_s - NOTICE_S for end in self.ends)
        if not (is_taken or has_ended):
            self.wrong.append(f"a reload was not taken over: {done}")
        return done

    def hurt(self, replica: int, kind: str, way: str) -> Fault:
        """Kill or stop a process and wait until its replica serves again."""
        if kind == GATEWAY:
            return self.hurt_gateway(way)
        server = self.servers[replica]
        victim = until(lambda: self.is_well(server) and pid_of(server, kind), f"replica {replica}", HEAL_LIMIT_S)
        began_s = time.monotonic()
        os.kill(victim, SIGNALS[way])
        until(
            lambda: self.is_well(server) and pid_of(server, kind) not in (None, victim),
            f"another {kind} after {way}",
            HEAL_LIMIT_S,
        )
        fault = Fault(kind, way, replica, began_s, time.monotonic() - began_s)
        self.faults.append(fault)
        return fault

    def hurt_gateway(self, way: str) -> Fault:
        """Kill or stop the gateway that the callers use, and wait until another process serves them."""
        until(lambda: not self.gateway.is_starting, "the gateway's first probe", HEAL_LIMIT_S)
        victim, began_s = self.gateway.pid, time.monotonic()
        os.kill(victim, SIGNALS[way])
        until(lambda: self.gateway.pid != victim and self.gateway.serves(), f"a gateway after {way}", HEAL_LIMIT_S)
        self.faults.append(Fault(GATEWAY, way, -1, began_s, time.monotonic() - began_s))
        return self.faults[-1]

    def is_well(self, server: Server) -> bool:
        """Return whether a replica serves; a supervisor starts again what the launcher has given up."""
        if failure := server.failure():
            self.num_supervised += 1
            note(self.ends, self.servers.index(server), failure)
            server.stop()
            server.start()
        return server.why_not_ready() is None and _serves(server)

    def ends_behind(self, fault: Fault) -> list[End]:
        """Return the ends of Triton while its replica recovered from a fault."""
        near = (end for end in self.ends if end.replica == fault.replica)
        return [end for end in near if 0 <= end.at_s - fault.began_s <= fault.healed_s]

    def ended_itself(self) -> list[End]:
        """Return the ends of a Triton that nobody wanted: it was neither worn out nor the process that was hurt."""
        ours = [end for fault in self.faults if fault.kind == "tritonserver" for end in self.ends_behind(fault)]
        return [end for end in self.ends if not end.is_planned and end not in ours]

    def held(self) -> float:
        """Return how many KV blocks are held, and sequences of the engines live, on all replicas."""
        return sum(
            metric(server.metrics_url, "spec_kv_blocks", model="target", state="held") for server in self.servers
        )


def _serves(server: Server) -> bool:
    try:
        return not ask(server.grpc_url, text_input="a", max_tokens=1, timeout_ms=5000).error
    except Exception:  # no connection, no answer in time: not healed yet
        return False


def make_requests(number: int = 96) -> list[dict[str, Any]]:
    """Return seeded requests of all methods, lengths and samplings."""
    choose, requests = random.Random(3), []
    for i in range(number):
        phrase = "".join(choose.choices(LETTERS, k=8))
        request = {
            "text_input": (phrase + "".join(choose.choices(LETTERS, k=4))) * choose.choice([1, 2, 8]) + phrase,
            "speculation": METHODS[i % len(METHODS)],
            "seed": i,
            "max_tokens": choose.choice(LENGTHS),
            "ignore_eos": True,
            **SAMPLINGS[choose.randrange(len(SAMPLINGS))],
        }
        requests.append(request)
    return requests


@contextlib.contextmanager
def deployment(
    folder: Path, ends: list[End], layout: Layout = IN_TARGET
) -> Iterator[tuple[list[Server], RunningGateway, SupervisedGateway]]:
    """Run two replicas of a tiny random target with all drafters, and two gateways before them, one to be hurt."""
    shape = {"max_position_embeddings": 1024, "num_attention_heads": 2, "num_key_value_heads": 1}  # native kernels
    make_target(folder / "target", **shape)
    make_target(folder / "draft", **shape)
    for kind in HEADS:
        make_head(kind, folder / kind, wide=True)
    make_target(folder / "draft2", seed=2, **shape)
    for replica in range(2):
        write_settings(folder / f"serving-{replica}.toml", 0, layout)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                Server(
                    folder / f"serving-{replica}.toml",
                    say=partial(note, ends, replica),
                    hang_limit_s=HANG_LIMIT_S,
                    ready_limit_s=layout.ready_limit_s,
                )
            )
            for replica in range(2)
        ]
        urls = ",".join(server.grpc_url for server in servers)
        limits = {"silence_limit_s": 10, "first_limit_s": 30, "recovery_limit_s": 120, "health_interval_s": 0.5}
        gateway = stack.enter_context(running_gateway(urls, folder / "target", **limits))
        yield servers, gateway, stack.enter_context(SupervisedGateway(urls, folder / "target", **limits))


def write_settings(file: Path, number: int, layout: Layout = IN_TARGET) -> None:
    """Write a replica's deployment file with the settings of its reload of this number, 0 = its start."""
    file.write_text(layout.serving + layout.settings[number % len(layout.settings)])


def note(ends: list[End], replica: int, line: str) -> None:
    """Print a line of a replica's launcher, and note when its Triton has ended or is being replaced."""
    print(f"  {replica}: {line}", flush=True)
    is_planned = line.endswith(": restarting it")
    if is_planned or line.startswith("the server ended by signal"):
        ends.append(End(replica, time.monotonic(), is_planned))


@dataclass
class Result:
    """What a run saw. samples: what the second replica held, before, between two faults, at the end. held: KV blocks."""

    seconds: float
    readers: Readers
    callers: Callers
    visitors: Visitors
    chaos: Chaos
    samples: list[Sample]
    held: float
    num_preemptions: float
    num_moved: int

    def faults(self) -> list[str]:
        """Return wrong texts, lost requests, what has grown, and what was still held at rest."""
        found = [*self.readers.faults, *self.callers.faults, *self.visitors.faults, *self.chaos.wrong]
        found += growth(self.samples)
        found += [
            f"a call failed, but its gateway was well: {call}" for call in self.callers.calls if self._is_odd_call(call)
        ]
        found += [
            f"a visit failed, but nothing was hurt: {visit}" for visit in self.visitors.visits if self._is_odd(visit)
        ]
        if self.held:
            found.append(f"{self.held:g} KV blocks are held at rest")
        return found

    def _is_odd(self, visit: Visit) -> bool:
        """Return whether a visit failed while its replica was well."""
        if visit.outcome not in ("error", "cut", "unanswered") or visit.kind == "deadline":
            return False
        hurt = [(fault.replica, fault.began_s, fault.began_s + fault.healed_s) for fault in self.chaos.faults]
        hurt += [(reload.replica, reload.began_s, reload.began_s + reload.took_s) for reload in self.chaos.reloads]
        hurt += [
            (end.replica, end.at_s - NOTICE_S, end.at_s + self.chaos.layout.ready_limit_s) for end in self.chaos.ends
        ]
        return not any(
            replica == visit.replica and visit.began_s <= until_s + AFTERMATH_S and visit.ended_s >= since_s
            for replica, since_s, until_s in hurt
        )

    def _is_odd_call(self, call: Call) -> bool:
        """Return whether a call failed that did not meet the loss of its gateway."""
        losses = (fault for fault in self.chaos.faults if fault.kind == GATEWAY)
        return call.outcome != "text" and not any(
            call.began_s <= loss.began_s + loss.healed_s and call.ended_s >= loss.began_s for loss in losses
        )

    def _calls(self) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.callers.outcomes().items()))
        failed_s = [call.ended_s - call.began_s for call in self.callers.calls if call.outcome != "text"]
        return (
            f"Through the gateway that was hurt, and started {self.chaos.gateway.num_starts} times: {counts}; those "
            f"without a text took {max(failed_s, default=0.0):.1f} s at most."
        )

    def page(self) -> str:
        """Return the run's part of docs/figures/soak_under_faults.md."""
        num_replaced = sum(end.is_planned for end in self.chaos.ends)
        outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(self.readers.outcomes.items()))
        return "\n\n".join(
            [
                f"{self.seconds / 60:.0f} minutes, {len(self.chaos.faults)} faults, {self.num_preemptions:g} preemptions "
                f"(as the processes that live at the end have counted), {self.num_moved} streams moved by the gateway, "
                f"{self.chaos.num_supervised} replicas that the launcher had given up and a supervisor started again. "
                f"Triton ended by itself {len(self.chaos.ended_itself())} times, and was replaced as worn out {num_replaced} "
                "times.",
                self._reloads(),
                f"Through the gateway: {outcomes}.",
                self._calls(),
                self._visits(),
                self._healing(),
                table(self.samples),
            ]
        )

    def _reloads(self) -> str:
        if not (times := sorted(reload.took_s for reload in self.chaos.reloads)):
            return "No reload."
        taken = sum(reload.status == 200 for reload in self.chaos.reloads)
        return (
            f"{len(times)} reloads of changed settings, {taken} taken over, in "
            f"{times[len(times) // 2]:.1f} s (p50), {times[-1]:.1f} s (max)."
        )

    def _visits(self) -> str:
        counts = self.visitors.outcomes()
        outcomes = sorted({outcome for _, outcome in counts})
        lines = [f"| visit | {' | '.join(outcomes)} |", f"|---|{'---:|' * len(outcomes)}"]
        for kind in sorted({kind for kind, _ in counts}):
            lines.append(f"| {kind} | {' | '.join(str(counts[kind, outcome]) for outcome in outcomes)} |")
        return "\n".join(lines)

    def _healing(self) -> str:
        lines = ["| process | way | times | healed p50, s | max, s | Triton aborted | replaced |"]
        lines.append("|---|---|---:|---:|---:|---:|---:|")
        for kind, way in itertools.product((*self.chaos.layout.kinds, GATEWAY), SIGNALS):
            found = [fault for fault in self.chaos.faults if (fault.kind, fault.way) == (kind, way)]
            if found:
                times = sorted(fault.healed_s for fault in found)
                planned = [end.is_planned for fault in found for end in self.chaos.ends_behind(fault)]
                aborts = "–" if kind in ("tritonserver", GATEWAY) else planned.count(False)
                lines.append(
                    f"| `{kind}` | {way} | {len(found)} | {times[len(times) // 2]:.1f} | {times[-1]:.1f} | {aborts} | "
                    f"{planned.count(True)} |"
                )
        return "\n".join(lines)


#: Which replica, which process (the launcher, for a reload), in which way.
Hurt = tuple[int, str, str]


def script(minutes: float, times: int | None = None, kinds: Sequence[str] = KINDS) -> Iterator[Hurt]:
    """Return faults of every kind for so many minutes, by turns on both replicas; `tritonserver` on the first alone.

    After each fault the other replica reloads, so that the requests that it took over meet the change.
    times: the most of each kind of process in each way; without it, as many as there is time for.
    """
    end_s = time.monotonic() + minutes * 60
    for turn in itertools.count() if times is None else range(times):
        for kind, way in itertools.product((*kinds, GATEWAY), SIGNALS):
            replica = 0 if kind == "tritonserver" else turn % 2
            for hurt in ((replica, kind, way), (1 - replica, "launcher", RELOAD)):
                if time.monotonic() >= end_s:
                    return
                yield hurt


def run(
    servers: Sequence[Server],
    gateway: RunningGateway,
    hurt_gateway: SupervisedGateway,
    ends: list[End],
    hurts: Callable[[], Iterable[Hurt]],
    pause_s: float = 0.0,
    layout: Layout = IN_TARGET,
) -> Result:
    """Hurt one process after the other, with a pause between two, while readers and visitors come."""
    # Without drafts: the text is a matter of the seed alone. Both replicas have served all methods then.
    cases: list[Case] = ask_all(servers[0].grpc_url, make_requests(), speculation="none")
    ask_all(servers[1].grpc_url, [case.inputs for case in cases])
    chaos, footprints = Chaos(servers, hurt_gateway, ends, layout=layout), Footprints(servers[1])
    footprints.look()
    readers = Readers(gateway.url, cases, NUM_READERS, THINK_S)
    callers = Callers(hurt_gateway.url, cases, NUM_CALLERS, THINK_S)
    visitors = Visitors([(server.grpc_url, server.http_url) for server in servers], cases, NUM_VISITORS, THINK_S)
    began_s = time.monotonic()
    for clients in (readers, callers, visitors):
        clients.start()
    try:
        for replica, kind, way in hurts():
            next_s = time.monotonic() + pause_s
            done = chaos.reload(replica) if way == RELOAD else chaos.hurt(replica, kind, way)
            triton = footprints.look().held.get("tritonserver")
            print(f"{time.monotonic() - began_s:.0f} s: {done}; {triton}; {dict(readers.outcomes)}", flush=True)
            if readers.faults or callers.faults or visitors.faults or chaos.wrong:
                break
            time.sleep(max(next_s - time.monotonic(), 0.5))
    except KeyboardInterrupt:
        print("interrupted: what was seen until now", flush=True)
    finally:
        for clients in (visitors, callers, readers):
            clients.stop()
    seconds = time.monotonic() - began_s
    time.sleep(REST_S)
    # Triton may have ended by itself meanwhile; its replica is then away for the seconds of its start.
    until(lambda: all(map(chaos.is_well, servers)), "both replicas", HEAL_LIMIT_S)
    until(lambda: chaos.held() == 0, "the end of all sequences")
    preempted = sum(metric(server.metrics_url, "spec_preemptions_total", model="target") for server in servers)
    footprints.look()
    num_moved = int(gateway.metric("spec_gateway_failovers_total"))
    return Result(seconds, readers, callers, visitors, chaos, footprints.samples, chaos.held(), preempted, num_moved)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the acceptance test; return 1 for a wrong text, a lost request, what has grown, or is held at rest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="(30; with --times as long as it takes)")
    parser.add_argument("--times", type=int, help="end when every kind of process was hurt so often in each way")
    parser.add_argument("--pause-s", type=float, default=1.0, help="between two faults, at least (%(default)s)")
    parser.add_argument(
        "--own-drafters",
        action="store_const",
        const=OWN_PROCESSES,
        default=IN_TARGET,
        dest="layout",
        help="each drafter in a process of its own (placement separate), which is killed and stopped like the others",
    )
    options = parser.parse_args(arguments)
    minutes = options.minutes or (math.inf if options.times else 30.0)
    ends, layout = list[End](), options.layout
    with tempfile.TemporaryDirectory() as name, deployment(Path(name), ends, layout) as (servers, *gateways):
        hurts = partial(script, minutes, options.times, layout.kinds)
        result = run(servers, *gateways, ends, hurts, options.pause_s, layout)
    print(result.page())
    for fault in result.faults()[:10]:
        print(f"FAULT: {fault[:2000]}")
    return int(bool(result.faults()))


if __name__ == "__main__":
    sys.exit(main())
