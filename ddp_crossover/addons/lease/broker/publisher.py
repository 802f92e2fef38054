"""Publishes what the arbiter has decided: on the state page, as grants, and in the figures of ``lease status``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..protocol import Kind, Message, Role
from ..shared_memory import RESOURCE_SLOTS, PageWriter
from .arbiter import Arbiter, Grant
from .connections import Connections
from .figures import ResourceFigures
from .jobs import JobKey


@dataclass(slots=True)
class _PublishedResource:
    slot: int  # on the state page
    figures: ResourceFigures


class Publisher:
    """What clients are told about resources that have members.

    Args:
        arbiter: decides who holds what.
        connections: the members.
        send: sends a message to a member. If that fails, it removes the member, also from the arbiter.
    """

    def __init__(self, arbiter: Arbiter, connections: Connections, send: Callable[[int, Message], None]) -> None:
        self.page = PageWriter()
        self._evictions = 0
        self._grants = 0
        self._arbiter = arbiter
        self._connections = connections
        self._send = send
        self._resources: dict[str, _PublishedResource] = {}

    def count_eviction(self) -> None:
        self._evictions += 1

    def has_room(self, resource: str) -> bool:
        """Whether ``resource`` has a slot on the page or can be given one."""
        return resource in self._resources or len(self._resources) < RESOURCE_SLOTS

    def add_job(self, resource: str, key: JobKey, role: Role, now_s: float) -> int:
        """Start publishing ``resource``, and the figures of a job on it. Returns the slot on the page."""
        known = self._resources.get(resource)
        if known is None:
            slot = min(set(range(RESOURCE_SLOTS)) - {other.slot for other in self._resources.values()})
            known = self._resources[resource] = _PublishedResource(slot, ResourceFigures(now_s))
        known.figures.join(key, role.name.lower(), now_s)
        return known.slot

    def remove_job(self, resource: str, key: JobKey) -> None:
        """Stop publishing figures of a job that has left ``resource``."""
        if resource in self._resources:
            self._resources[resource].figures.leave(key)

    def remove_resource(self, resource: str) -> None:
        """Stop publishing a resource whose last member has left."""
        self.page.show(self._resources.pop(resource).slot, self._arbiter.view(resource))

    def publish(self, resource: str, grants: list[Grant], now_s: float) -> None:
        """Write the new state of a resource to the state page, then send the grants to the new holders."""
        # Write the page first: a client that receives a grant must find its fence there.
        self.page.show(self._resources[resource].slot, self._arbiter.view(resource))
        self._grants += len(grants)
        for member, request, fence in grants:
            self._send(member, Message(Kind.GRANT, 0, request, fence))

        # The rest is off the grants' path. If a grant could not be sent, the resource may be gone.
        if (pair := self._arbiter.handover(resource)) is not None:
            self._connections.introduce(*pair)
        if (known := self._resources.get(resource)) is not None:
            known.figures.change(now_s, self._arbiter.holding_job(resource), self._arbiter.queue(resource))

    def renew_promises(self) -> None:
        """Show the promises that follow from the virtual times of now."""
        for resource in self._arbiter.contended():
            if self._arbiter.renew_promise(resource):
                self.publish(resource, [], time.monotonic())

    def status(self) -> dict[str, Any]:
        """Return the state that ``lease status`` shows, ready for JSON."""
        members: dict[str, list[dict[str, Any]]] = {name: [] for name in self._resources}
        for each in self._connections:
            if each.joined is not None:
                key, name = each.joined
                holds = each.member in self._arbiter.holders(name)
                members[name].append({"job": key.name, "pid": each.peer.pid, "uid": key.uid, "holds": holds})
        resources = [self._status_of(name, members[name]) for name in self._arbiter.resources()]
        return {"pid": os.getpid(), "grants": self._grants, "evictions": self._evictions, "resources": resources}

    def _status_of(self, resource: str, members: list[dict[str, Any]]) -> dict[str, Any]:
        holder, queue = self._arbiter.holding_job(resource), self._arbiter.queue(resource)
        figures = self._resources[resource].figures
        figures.change(time.monotonic(), holder, queue)
        return {
            "resource": resource,
            "holder": holder.name if holder is not None else None,
            "fence": self._arbiter.view(resource).fence,
            "waiting": sorted(key.name for key in queue),
            "members": members,
            "jobs": figures.as_dicts(),
        }
