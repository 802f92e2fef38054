"""Run the broker of the GPU lease, and show which job holds which GPU and how jobs spend their time.

Exit status: 0 if all went well, 1 if no broker can be asked, 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .broker.server import Broker, BrokerSettings
from .client.connection import RefusedError, ask_status
from .directory import BrokerDirectory, DirectoryError
from .peer_process import require_linux
from .protocol import ProtocolError

_STATUS_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their options to ``parser``."""
    verbs = parser.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser("serve", help="run a broker in the foreground, for containers that share its directory")
    add = serve.add_argument
    add("--allow-uid", type=int, action="append", default=[], help="id of another user who may connect; repeatable")
    add("--group", help="group whose members can reach the socket; each of them also needs --allow-uid")
    add("--idle-exit-s", type=float, default=math.inf, help="seconds without clients before it exits (default: never)")
    status = verbs.add_parser("status", help="show which job holds each resource and which jobs wait for it")
    status.add_argument("--json", action="store_true", help="print the status as JSON")
    top = verbs.add_parser("top", help="show the status and how each job spends its time, updated until Ctrl-C")
    top.add_argument("--interval", type=float, default=1.0, help="seconds that each update covers (default: 1)")
    top.add_argument("--once", action="store_true", help="show one interval and exit")
    top.add_argument("--json", action="store_true", help="print one line of JSON for each interval")
    for verb in (serve, status, top):
        verb.add_argument("--directory", help="directory of the broker's socket (default: the one that jobs use)")


def run(args: argparse.Namespace) -> int:
    """Run the verb in ``args`` and return the exit status."""
    directory = BrokerDirectory(args.directory)
    try:
        require_linux()
        if args.verb == "serve":
            return _serve(directory, args)
        return _status(directory, args.json) if args.verb == "status" else _top(directory, args)
    except (OSError, DirectoryError, ProtocolError, RefusedError) as error:
        print(f"lease {args.verb}: {error}", file=sys.stderr)
        return 1


def _ask(directory: BrokerDirectory) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads(ask_status(directory, _STATUS_S))
    except (FileNotFoundError, ConnectionRefusedError):
        raise ConnectionError(
            f"no broker serves {directory.path}: start a job that has a lease, "
            "or run python -m ddp_crossover lease serve"
        ) from None
    return status


def _serve(directory: BrokerDirectory, args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = BrokerSettings(frozenset(args.allow_uid), args.group, args.idle_exit_s)
    broker = Broker(directory, settings)
    if not broker.serving:
        print(
            f"lease serve: another broker already serves {directory.path}: end it, or choose another --directory",
            file=sys.stderr,
        )
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        broker.serve_forever()
    return 0


def _status(directory: BrokerDirectory, as_json: bool) -> int:
    answer = with_shares(_ask(directory))
    if as_json:
        print(json.dumps(answer, indent=2))
        return 0
    print(f"broker {answer['pid']} in {directory.path}: {answer['grants']} grants, {answer['evictions']} evictions")
    for resource in answer["resources"]:
        waiting = ", ".join(resource["waiting"]) or "nobody"
        print(f"{resource['resource']}: held by {resource['holder'] or 'nobody'}, {waiting} waiting")
    return 0


def _top(directory: BrokerDirectory, args: argparse.Namespace) -> int:
    statuses = itertools.islice(_intervals(directory, args.interval), 1 if args.once else None)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        if args.json:
            for status in statuses:
                print(json.dumps(status), flush=True)
        else:
            # Import here: rich is missing if the broker runs without site-packages.
            from .top import show

            show(statuses)
    return 0


def _intervals(directory: BrokerDirectory, interval_s: float) -> Iterator[dict[str, Any]]:
    """Yield the status with shares at the end of each interval, forever."""
    before = _ask(directory)
    while True:
        time.sleep(interval_s)
        now = with_shares(_ask(directory), before)
        yield now
        before = now


def with_shares(now: dict[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Add to each job in the broker's status ``now`` its shares of time and its hand-offs per second.

    They cover the time since ``before``, an earlier status. Without ``before``, or if the job or the broker was
    restarted since, they cover the time since the job joined. Modifies and returns ``now``.
    """
    earlier = {}
    if before is not None and before["pid"] == now["pid"]:
        earlier = {(r["resource"], j["uid"], j["job"]): j for r in before["resources"] for j in r["jobs"]}
    for resource in now["resources"]:
        for job in resource["jobs"]:
            job.update(_shares(job, earlier.get((resource["resource"], job["uid"], job["job"]))))
    return now


def _shares(job: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, float]:
    if before is None or _present_s(before) > _present_s(job):
        before = dict.fromkeys(job, 0)
    passed = {name: job[name] - before[name] for name in ("held_s", "waited_s", "gap_s", "filled_s", "handoffs")}
    present_s = _present_s(passed)
    return {
        "held": _share(passed["held_s"], present_s),
        "waited": _share(passed["waited_s"], present_s),
        # The rest of its time is what it would have taken without the waits.
        "slower": _share(passed["waited_s"], present_s - passed["waited_s"]),
        "gap": _share(passed["gap_s"], present_s),
        "gap_filled": _share(passed["filled_s"], passed["gap_s"]),
        "handoffs_per_s": _share(passed["handoffs"], present_s),
    }


def _present_s(job: Mapping[str, float]) -> float:
    return job["held_s"] + job["waited_s"] + job["gap_s"]


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole > 0 else 0.0
