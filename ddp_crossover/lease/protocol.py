"""What broker and clients say to each other: fixed-size messages over a Unix ``SOCK_SEQPACKET`` socket.

The kernel keeps the boundaries of messages, so a message either has exactly one of the sizes below or is refused. All
numbers are little-endian. A *request* number grows with every request of a connection, a *fence* with every grant
of a host: whatever is late or comes twice names an old one, and is ignored.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = 0xDDC0
VERSION = 2
NAME_BYTES = 96
WEIGHTS = (0.01, 100.0)

_HEADER = struct.Struct("<HBBIQQ8x")  # magic, version, kind, value, request, fence
_HELLO = struct.Struct(f"<B7xd{NAME_BYTES}s{NAME_BYTES}s")  # role, weight, job, resource

MESSAGE_BYTES = _HEADER.size
HELLO_BYTES = _HEADER.size + _HELLO.size
STATUS_BYTES = 1 << 18
"""Room for the answer to STATUS: JSON, the only message that is not of fixed size."""


class Kind(IntEnum):
    """What a message is. A client opens with HELLO or STATUS; after that it sends the other three."""

    HELLO = 1  # client: job, resource, role and weight of this connection
    WELCOME = 2  # broker: value = slot in the state page, which comes along as a file descriptor
    REFUSED = 3  # broker: value = Refusal; the connection ends
    REQUEST = 4  # client: wants the resource
    GRANT = 5  # broker: answers that request, with the fence to hold under
    RELEASE = 6  # client: gives up that fence; a request other than 0 queues again in the same breath
    CANCEL = 7  # client: wants nothing of what it has asked for up to that request, granted or not
    STATUS = 8  # client: wants the state as JSON


_KINDS = {int(kind): kind for kind in Kind}  # calling Kind costs a microsecond of every hand-off


class Role(IntEnum):
    """Who goes first: a filler gets what no peer wants, and is asked to yield when one does."""

    PEER = 0
    FILLER = 1


class Refusal(IntEnum):
    """Why a connection was turned away."""

    MALFORMED = 1
    VERSION = 2
    NOT_ALLOWED = 3
    FULL = 4
    MISMATCH = 5


REFUSALS: dict[int, str] = {
    Refusal.MALFORMED: "it did not understand the message",
    Refusal.VERSION: "it speaks another version of the protocol: end it, or use one version of ddp_crossover per host",
    Refusal.NOT_ALLOWED: "this user is not allowed: start it with `lease serve --allow-uid`",
    Refusal.FULL: "its limit of connections, jobs or resources is reached",
    Refusal.MISMATCH: "the job is already there with another weight or role: job names must be unique",
}


class ProtocolError(Exception):
    """A message that is not one. Ends its connection."""

    def __init__(self, refusal: Refusal, what: str) -> None:
        super().__init__(what)
        self.refusal = refusal


class Message(NamedTuple):
    """Every message, or the head of HELLO."""

    kind: Kind
    value: int = 0
    request: int = 0
    fence: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, *self)


class Hello(NamedTuple):
    """Who a connection is. Names are at most 96 bytes of printable text."""

    job: str
    resource: str
    role: Role
    weight: float

    def encode(self) -> bytes:
        body = _HELLO.pack(self.role, self.weight, self.job.encode(), self.resource.encode())
        return Message(Kind.HELLO).encode() + body


def decode(data: bytes) -> Message:
    """The message in ``data``, or the head of it if it is HELLO. Raises :class:`ProtocolError`."""
    if len(data) not in (MESSAGE_BYTES, HELLO_BYTES):
        raise ProtocolError(Refusal.MALFORMED, f"{len(data)} bytes are no message")
    magic, version, kind, value, request, fence = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(Refusal.MALFORMED, "wrong magic number")
    if version != VERSION:
        raise ProtocolError(Refusal.VERSION, f"version {version}, ours is {VERSION}")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(Refusal.MALFORMED, f"unknown kind {kind}")
    if (known is Kind.HELLO) != (len(data) == HELLO_BYTES):
        raise ProtocolError(Refusal.MALFORMED, f"{len(data)} bytes are no {known.name}")
    return Message(known, value, request, fence)


def decode_hello(data: bytes) -> Hello:
    """The HELLO in ``data``, which :func:`decode` has called one. Raises :class:`ProtocolError`."""
    role, weight, job, resource = _HELLO.unpack_from(data, _HEADER.size)
    try:
        hello = Hello(job.rstrip(b"\0").decode(), resource.rstrip(b"\0").decode(), Role(role), weight)
        require_sound(hello)
    except ValueError as error:
        raise ProtocolError(Refusal.MALFORMED, str(error)) from None
    return hello


def require_sound(hello: Hello) -> None:
    """Raise ``ValueError`` for a name or weight that the protocol cannot carry."""
    for what, name in (("job", hello.job), ("resource", hello.resource)):
        if not name or not name.isprintable() or len(name.encode()) > NAME_BYTES:
            raise ValueError(f"{what} must be 1 to {NAME_BYTES} bytes of printable text, got {name!r}")
    low, high = WEIGHTS
    if not (math.isfinite(hello.weight) and low <= hello.weight <= high):
        raise ValueError(f"weight must be between {low} and {high}, got {hello.weight}")
