"""Messages between broker and clients: fixed-size packets over a Unix ``SOCK_SEQPACKET`` socket.

The kernel preserves message boundaries, so a message has exactly one of the sizes below or is refused. All numbers are
little-endian. The *request* number grows with every request of a connection, the *fence* with every new hold on a host.
Late and duplicate messages carry an old number and are ignored.
"""

from __future__ import annotations

import math
import os
import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = 0xDDC0
VERSION = 2
NAME_BYTES = 96
WEIGHTS = (0.01, 100.0)

_HEADER = struct.Struct("<HBBIQQQ")  # magic, version, kind, value, request, fence, successor
_HELLO = struct.Struct(f"<B7xd{NAME_BYTES}s{NAME_BYTES}s")  # role, weight, job, resource

MESSAGE_BYTES = _HEADER.size
HELLO_BYTES = _HEADER.size + _HELLO.size
TAKES_OVER = int(hasattr(os, "eventfd"))
"""Value of HELLO from a client that can be handed a resource by another one: 1, or 0 if the system cannot do that."""
STATUS_BYTES = 1 << 18
"""Maximum size of the answer to STATUS. It is JSON, the only message that is not of fixed size."""


class Kind(IntEnum):
    """The type of a message. Clients open with HELLO or STATUS; after HELLO they send REQUEST, RELEASE and CANCEL."""

    HELLO = 1  # client: the connection's job, resource, role and weight; value = TAKES_OVER or 0
    WELCOME = 2  # broker: value = slot on the state page, request = the number of the member; the descriptors of the
    #              page and, if the client takes over, of its alarm and its note come with it
    REFUSED = 3  # broker: value = Refusal; the broker then closes the connection
    REQUEST = 4  # client: requests the resource
    GRANT = 5  # broker: grants the request, with the fence to hold under
    RELEASE = 6  # client: ends the hold under the fence; a nonzero request number also queues a new request, a nonzero
    #              successor is the promised fence under which the client has handed the resource over
    CANCEL = 7  # client: withdraws its requests up to this number, whether granted or not
    STATUS = 8  # client: asks for the broker's state, which is sent as JSON
    INTRODUCE = 9  # broker: value = a member that this client may hand the resource to; its alarm comes with it


_KINDS = {int(kind): kind for kind in Kind}  # calling Kind() would add a microsecond to every hand-off


class Role(IntEnum):
    """Priority of a job: a filler is granted only what no peer waits for, and is asked to yield once a peer waits."""

    PEER = 0
    FILLER = 1


class Refusal(IntEnum):
    """Why the broker refused a connection."""

    MALFORMED = 1
    VERSION = 2
    NOT_ALLOWED = 3
    FULL = 4
    MISMATCH = 5


REFUSALS: dict[int, str] = {
    Refusal.MALFORMED: "a message is malformed",
    Refusal.VERSION: "it uses another version of the protocol: end that broker, or use one version of ddp_crossover",
    Refusal.NOT_ALLOWED: "this user may not connect: start the broker with `lease serve --allow-uid`",
    Refusal.FULL: "its limit of connections, jobs or resources is reached: end jobs that are no longer needed",
    Refusal.MISMATCH: "the job is already connected with another weight or role: job names must be unique",
}
"""What a client tells its user about a refusal, after "the broker refused the connection:"."""


class ProtocolError(Exception):
    """An invalid or refused message, which ends its connection."""

    def __init__(self, refusal: Refusal, what: str) -> None:
        super().__init__(what)
        self.refusal = refusal


class Message(NamedTuple):
    """A fixed-size message, or the header of HELLO."""

    kind: Kind
    value: int = 0
    request: int = 0
    fence: int = 0
    successor: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, *self)


class Hello(NamedTuple):
    """Identity of a connection. Names are 1 to 96 bytes of printable text; the weight is 0.01 to 100."""

    job: str
    resource: str
    role: Role
    weight: float

    def encode(self, value: int = 0) -> bytes:
        body = _HELLO.pack(self.role, self.weight, self.job.encode(), self.resource.encode())
        return Message(Kind.HELLO, value).encode() + body


def decode(data: bytes) -> Message:
    """Decode ``data``; of HELLO only the header. Raises :class:`ProtocolError`."""
    if len(data) not in (MESSAGE_BYTES, HELLO_BYTES):
        raise ProtocolError(Refusal.MALFORMED, f"a message must not have {len(data)} bytes")
    magic, version, kind, value, request, fence, successor = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(Refusal.MALFORMED, "the magic number is wrong")
    if version != VERSION:
        raise ProtocolError(
            Refusal.VERSION, f"the peer uses version {version} of the protocol, this process version {VERSION}"
        )
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(Refusal.MALFORMED, f"message kind {kind} is unknown")
    if (known is Kind.HELLO) != (len(data) == HELLO_BYTES):
        raise ProtocolError(Refusal.MALFORMED, f"a {known.name} message must not have {len(data)} bytes")
    return Message(known, value, request, fence, successor)


def decode_hello(data: bytes) -> Hello:
    """Decode ``data``, which :func:`decode` has identified as HELLO. Raises :class:`ProtocolError`."""
    role, weight, job, resource = _HELLO.unpack_from(data, _HEADER.size)
    try:
        hello = Hello(job.rstrip(b"\0").decode(), resource.rstrip(b"\0").decode(), Role(role), weight)
        require_valid(hello)
    except ValueError as error:
        raise ProtocolError(Refusal.MALFORMED, str(error)) from None
    return hello


def require_valid(hello: Hello) -> None:
    """Raise ``ValueError`` for a name or weight that the protocol cannot carry."""
    for what, name in (("job", hello.job), ("resource", hello.resource)):
        if not name or not name.isprintable() or len(name.encode()) > NAME_BYTES:
            raise ValueError(f"{what} must be 1 to {NAME_BYTES} bytes of printable text, got {name!r}")
    low, high = WEIGHTS
    if not (math.isfinite(hello.weight) and low <= hello.weight <= high):
        raise ValueError(f"weight must be between {low} and {high}, got {hello.weight}")
