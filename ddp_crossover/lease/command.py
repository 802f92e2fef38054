"""``lease serve`` and ``lease status``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import signal
import sys

from .broker import Broker, BrokerSettings
from .connection import RefusedError, ask_status
from .places import Place, PlaceError
from .protocol import ProtocolError

_STATUS_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verbs and their options."""
    verbs = parser.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser("serve", help="run the broker here, for containers that share its directory")
    serve.add_argument("--allow-uid", type=int, action="append", default=[], help="another user who may connect")
    serve.add_argument("--group", help="group that may reach the socket; its users also need --allow-uid")
    serve.add_argument("--idle-exit-s", type=float, default=math.inf, help="exit after so long without a client")
    status = verbs.add_parser("status", help="show who holds what")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    for verb in (serve, status):
        verb.add_argument("--directory", help="where the socket is; the default is the user's own place")


def run(args: argparse.Namespace) -> int:
    """Do what ``args`` says; the exit status."""
    place = Place(args.directory)
    try:
        return _serve(place, args) if args.verb == "serve" else _status(place, args.json)
    except (OSError, KeyError, PlaceError, ProtocolError, RefusedError) as error:
        print(f"lease {args.verb}: {error}", file=sys.stderr)
        return 1


def _serve(place: Place, args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = BrokerSettings(frozenset(args.allow_uid), args.group, args.idle_exit_s)
    broker = Broker(place, settings)
    if not broker.serving:
        print(f"lease serve: another broker serves {place.directory}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        broker.serve_forever()
    return 0


def _status(place: Place, as_json: bool) -> int:
    answer = json.loads(ask_status(place, _STATUS_S))
    if as_json:
        print(json.dumps(answer, indent=2))
        return 0
    print(f"broker {answer['pid']} in {place.directory}: {answer['grants']} grants, {answer['evictions']} evictions")
    for resource in answer["resources"]:
        waiting = ", ".join(resource["waiting"]) or "nobody"
        print(f"{resource['resource']}: held by {resource['holder'] or 'nobody'}, {waiting} waiting")
    return 0
