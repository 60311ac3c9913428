"""What of NIXL its engine calls, in a few lines: agents of one process that copy memory, for tests without NIXL.

Doubles, and no more: they say what the engine does with such agents, not that NIXL has them. That is for
tests/engines/check_nixl.py, which runs where NIXL is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class nixlNotFoundError(Exception):
    """No such memory, or agent."""


class nixlBackendError(Exception):
    """The backend refuses."""


class nixlRemoteDisconnectError(Exception):
    """The other agent is gone."""


class Network:
    """Agents that reach each other."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.is_stuck = False  # transfers do not end
        self.refuses: set[int] = set()  # addresses that cannot be registered
        self.refuses_kind: Callable[[str, Any], bool] = lambda kind, row: False
        self.made = 0


class Agent:
    """An agent."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name
        self.registered: list[tuple[int, int]] = []
        self.peers: list[str] = []
        self.handles = 0
        network.agents[name] = self
        network.made += 1

    def register_memory(self, rows: Any, mem_type: str) -> Any:
        if any(row[0] in self.network.refuses or self.network.refuses_kind(mem_type, row) for row in rows):
            raise nixlBackendError("read-only")
        added = [(row[0], row[1]) for row in rows]
        self.registered += added
        return added

    def deregister_memory(self, registered: Any) -> None:
        for row in registered:
            self.registered.remove(row)

    def get_partial_agent_metadata(self, registered: Any, connection: bool, backends: Any) -> bytes:
        return f"agent {self.name}".encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        said, _, name = metadata.decode().partition(" ")
        if said != "agent":
            raise nixlNotFoundError(metadata)
        self.peers.append(name)
        return name.encode()

    def remove_remote_agent(self, name: str) -> None:
        self.peers = [one for one in self.peers if one != name]

    def get_xfer_descs(self, rows: Any, mem_type: str) -> Any:
        return rows

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str) -> Any:
        assert operation == "READ"
        other = self.network.agents.get(peer)
        if peer not in self.peers:
            raise nixlNotFoundError(peer)
        if other is None:
            raise nixlRemoteDisconnectError(peer)
        for agent, rows in ((self, here), (other, there)):
            for address, nbytes, _ in rows:
                if not any(low <= address and address + nbytes <= low + size for low, size in agent.registered):
                    raise nixlNotFoundError(hex(address))
        self.handles += 1
        return SimpleNamespace(here=here[0], there=there[0], looks=0)

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        handle.looks += 1
        if self.network.is_stuck or handle.looks < 2:
            return "PROC"
        ctypes.memmove(handle.here[0], handle.there[0], handle.here[1])
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        self.handles -= 1


def module(network: Network) -> ModuleType:
    """Return the module."""
    made = ModuleType("nixl")
    made.nixl_agent_config = lambda **options: options  # type: ignore[attr-defined]
    made.nixl_agent = lambda name, config: Agent(network, name)  # type: ignore[attr-defined]
    return made
