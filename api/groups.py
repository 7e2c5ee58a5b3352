"""Client groups and the processes they consist of: what a group holds ends when all of them are gone.

A process is watched through a pidfd, which the kernel makes readable when it ends. The pid is the one that
the kernel tells of the socket's other end, not one that a client claims.
Sources: Linux manual pages unix(7) (SO_PEERCRED), pidfd_open(2), proc_pid_stat(5).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ..kvstore.handles import Generations
from ..kvstore.policy import Ids
from ..kvstore.space import HostSpace
from ..tiers.errors import AccessDeniedError, ServiceUnavailableError
from ..tiers.record_file import RecordFile
from .claims import Claims, HeldHandles
from .group_book import GroupBook
from .messages import Flags

__all__ = ["UNNAMED", "Group", "Groups", "Peer", "Watched", "peer_of", "start_of"]

_REMOTE: Final = b"tcp"
"""Before the names of groups over TCP, which are longer so than any that local clients say."""
UNNAMED: Final = bytes(16)
"""Client of a group that does not say which one it is; there may be several."""
_CREDENTIALS: Final = struct.Struct("3i")
_SO_PEERPIDFD: Final = 77
"""Linux 6.5 and later: a pidfd of the very process that connected, whatever became of its number since."""
_STARTED_FIELD: Final = 19
"""Of /proc/PID/stat after the name: when the process started, in clock ticks since boot."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Peer:
    """The process at the other end of a Unix socket.

    Args:
        pid: its number.
        uid: its user.
        started: when it started, in clock ticks since boot; with the pid it names the process for good.
        pidfd: a descriptor of it, to be closed by whoever has this.
    """

    pid: int
    uid: int
    started: int
    pidfd: int


def peer_of(connected: socket.socket, accepted: float) -> Peer:
    """Who connected a Unix socket.

    Args:
        connected: the socket.
        accepted: when it was accepted, by `time.clock_gettime(time.CLOCK_BOOTTIME)`.

    Raises:
        AccessDeniedError: the process cannot be seen from here, or is gone.
    """
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if pid <= 0:
        raise AccessDeniedError(
            "the client's process cannot be seen from here: it is in another pid namespace"
        )
    exact = True
    try:
        pidfd = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        exact = False
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise AccessDeniedError(
                f"the client's process {pid} cannot be watched: {error.strerror}"
            ) from error
    try:
        try:
            started = start_of(pid)
        except OSError as error:
            raise AccessDeniedError(f"the client's process {pid} cannot be seen: {error.strerror}") from error
        # Alive after the look at its number: so the look was at this process, not at one that came after it.
        # One whose descriptor was opened by number, and that started after its client connected, is another.
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        if ended.poll(0) or (not exact and started > accepted * _TICKS):
            raise AccessDeniedError(f"the client's process {pid} is gone")
    except BaseException:
        os.close(pidfd)
        raise
    return Peer(pid, uid, started, pidfd)


def start_of(pid: int) -> int:
    """When the process of this number started, in clock ticks since boot.

    Raises:
        OSError: there is none, or it cannot be seen.
    """
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[_STARTED_FIELD])


@dataclass(frozen=True)
class Watched:
    """A process of a group.

    Args:
        pid, started: which one; see `Peer`.
        pidfd: a descriptor of it, to be closed by whoever has this.
    """

    pid: int
    started: int
    pidfd: int


class Member(Protocol):
    """A connection, as far as its group needs it."""

    def end(self) -> None:
        """Close it at once."""
        ...


class Group:
    """A client group: its processes, its connections, and what it holds of each space.

    Args:
        group_id: 16 bytes that its processes share.
        uid: the user that they run as; None for a client over TCP, whose group ends with its connection.
        book: where it is written down for the next sidecar; None: nowhere.

    Attributes:
        id, uid: as given.
        pidfds: descriptors of its processes, by number and start.
        members: its open connections, and which client of the group each is.
        ended: whether all its processes are gone; nothing is given to it any more.
    """

    def __init__(self, group_id: bytes, uid: int | None, book: GroupBook | None = None) -> None:
        self.id = group_id
        self.uid = uid
        self._book = book
        self.members: dict[Member, bytes] = {}
        self.ended = False
        self._called: dict[bytes, str] = {}
        self.pidfds: dict[tuple[int, int], int] = {}
        self._claims: dict[bytes, dict[bytes, Claims]] = {}

    def join(self, member: Member, client: bytes, name: str = "") -> None:
        """A connection is made. One that the same client had before is ended: it came back by this one.

        Args:
            name: what the client calls itself.
        """
        holds = {one for clients in self._claims.values() for one in clients}
        known = holds.union(self.members.values())
        self._called = {one: text for one, text in self._called.items() if one in known} | {client: name}
        if client != UNNAMED:
            for other in [one for one, name in self.members.items() if name == client]:
                other.end()
        self.members[member] = client

    def forget_idle(self, client: bytes) -> None:
        """A client may be gone: keep no books of it where it is not connected and holds nothing."""
        if client in self.members.values():
            return
        for clients in self._claims.values():
            claims = clients.get(client)
            if claims is not None and not claims.leased and not claims.reserved:
                self._forget(clients.pop(client))

    def claims(self, space: HostSpace, client: bytes) -> Claims:
        """What one of its clients holds of a space.

        Raises:
            ServiceUnavailableError: the group has ended.
            CapacityError, MemoryUnavailableError: there is no room to write it down.
        """
        if self.ended:
            raise ServiceUnavailableError("the processes of this client group are gone")
        clients = self._claims.setdefault(space.id, {})
        claims = clients.get(client)
        if claims is None:
            arrays = None
            if self._book is not None:
                arrays = self._book.add_claims(client, space.id, space.capacity)
            claims = clients[client] = Claims(space, arrays)
        return claims

    def adopt(self, client: bytes, claims: Claims) -> None:
        """What one of its clients holds of a space since an earlier sidecar's time."""
        self._claims.setdefault(claims.space.id, {})[client] = claims

    def add_process(self, process: Watched) -> None:
        """A process is of the group; its descriptor is the group's.

        Raises:
            CapacityError: the group has too many.
        """
        if self._book is not None:
            self._book.add_process(process.pid, process.started)
        self.pidfds[process.pid, process.started] = process.pidfd

    def remove_process(self, name: tuple[int, int]) -> int:
        """A process is gone; returns its descriptor."""
        if self._book is not None:
            self._book.remove_process(*name)
        return self.pidfds.pop(name)

    def leave(self, member: Member) -> None:
        """A connection is closed."""
        client = self.members.pop(member, None)
        if client is not None:
            self.forget_idle(client)

    def _forget(self, claims: Claims) -> None:
        if self._book is not None:
            self._book.remove_claims(claims.arrays)

    def take_leases(
        self, space: HostSpace, client: bytes, slots: Ids, generations: Generations
    ) -> npt.NDArray[np.bool_]:
        """One lease less on each of these that the group has, the client's own before another's: bool [n]."""
        good = self.claims(space, client).take_leases(slots, generations)
        for other in () if np.count_nonzero(good) == len(good) else self._others(space, client):
            rest = np.flatnonzero(~np.isin(slots, slots[good]))
            good[rest] = other.take_leases(slots[rest], generations[rest])
        return good

    def take_reservations(
        self, space: HostSpace, client: bytes, slots: Ids, generations: Generations
    ) -> npt.NDArray[np.bool_]:
        """These are reserved no longer: bool [n] where the group had reserved them, whichever client."""
        good = self.claims(space, client).take_reservations(slots, generations)
        for other in () if good.all() else self._others(space, client):
            rest = np.flatnonzero(~np.isin(slots, slots[good]))
            good[rest] = other.take_reservations(slots[rest], generations[rest])
        return good

    def called(self, client: bytes) -> str:
        """What an operator knows a client by: its name, and the processes of its group."""
        where = "over TCP" if self.uid is None else ", ".join(f"pid {pid}" for pid, _ in sorted(self.pidfds))
        name = self._called.get(client, "")
        return f"{name} ({where})" if name and where else name or where or "a client"

    def held_by(self, client: bytes) -> tuple[int, int]:
        """Leases and reservations of one client."""
        claims = [clients[client] for clients in self._claims.values() if client in clients]
        return sum(one.leased for one in claims), sum(one.reserved for one in claims)

    def holders(self, space: HostSpace, slots: Ids, generations: Generations) -> dict[bytes, Flags]:
        """Of each of its clients bool [n]: which of these slots it holds."""
        claims = self._claims.get(space.id, {})
        return {client: one.holds(slots, generations) for client, one in claims.items()}

    def _others(self, space: HostSpace, client: bytes) -> list[Claims]:
        return [claims for name, claims in self._claims[space.id].items() if name != client]

    def _all(self) -> list[Claims]:
        return [claims for clients in self._claims.values() for claims in clients.values()]

    @property
    def reserved(self) -> int:
        """Slots that it has reserved."""
        return sum(claims.reserved for claims in self._all())

    @property
    def leased(self) -> int:
        """Leases that it holds."""
        return sum(claims.leased for claims in self._all())

    def take_all(self) -> list[HeldHandles]:
        """End the group: what it held, to be given back."""
        self.ended = True
        claims, self._claims = self._all(), {}
        held = [one.take_all() for one in claims if one.leased or one.reserved]
        for one in claims:
            self._forget(one)
        if self._book is not None:
            self._book.end()
        return held


class Groups:
    """All client groups. Used from the loop's thread only.

    Args:
        loop: tells when a process is gone.
        give_back: is called with what a group held when it has ended.
        records: the arena's, where it is written down what outlives this process; or None.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        give_back: Callable[[Sequence[HeldHandles]], None],
        records: RecordFile | None = None,
    ) -> None:
        self._loop = loop
        self._give_back = give_back
        self._records = records
        self._groups: dict[bytes, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def reserved(self) -> int:
        """Slots that are reserved by any group."""
        return sum(group.reserved for group in self._groups.values())

    @property
    def leased(self) -> int:
        """Leases of all groups."""
        return sum(group.leased for group in self._groups.values())

    def holders(self, space: HostSpace, slots: Ids, generations: Generations) -> tuple[dict[str, int], int]:
        """How many of these slots each client holds, by what it is called; and how many no client holds."""
        counted: dict[str, int] = {}
        unheld = np.ones(len(slots), dtype=np.bool_)
        for group in self._groups.values():
            for client, held in group.holders(space, slots, generations).items():
                if held.any():
                    name = group.called(client)
                    counted[name] = counted.get(name, 0) + int(np.count_nonzero(held))
                    unheld &= ~held
        return counted, int(np.count_nonzero(unheld))

    def attach(self, group_id: bytes, peer: Peer) -> Group:
        """A process is of this group from now on. Takes the peer's descriptor.

        Raises:
            AccessDeniedError: the group is another user's.
            CapacityError, MemoryUnavailableError: there is no room to write it down.
        """
        group = self._groups.get(group_id)
        try:
            if group is not None and group.uid != peer.uid:
                raise AccessDeniedError("the client group is another user's")
            if group is None:
                book = None
                if self._records is not None:
                    book = GroupBook.begin(self._records, group_id, peer.uid)
                group = self._groups[group_id] = Group(group_id, peer.uid, book)
            name = (peer.pid, peer.started)
            if name in group.pidfds:
                os.close(peer.pidfd)
            else:
                group.add_process(Watched(*name, peer.pidfd))
                self._watch(group, name)
        except BaseException:
            os.close(peer.pidfd)
            if group is not None:
                self.drop_if_idle(group)
            raise
        return group

    def adopt(
        self, book: GroupBook, processes: Sequence[Watched], claims: Sequence[tuple[bytes, Claims]]
    ) -> None:
        """A group of an earlier sidecar's time goes on, unless it holds nothing.

        Args:
            book: where it is written down.
            processes: those that live, and stand there. Takes their descriptors.
            claims: what each client holds of a space.
        """
        group = self._groups[book.id] = Group(book.id, book.uid, book)
        for client, one in claims:
            group.adopt(client, one)
        for process in processes:
            name = (process.pid, process.started)
            group.pidfds[name] = process.pidfd
            self._watch(group, name)
        self.drop_if_idle(group)

    def attach_remote(self, group_id: bytes, client: bytes) -> Group:
        """A group for one connection over TCP.

        The one that the same client of the same group had before is ended: its connection is broken, whether
        that is known here or not. Nobody else is of it, whatever they call themselves.
        """
        name = _REMOTE + group_id + (secrets.token_bytes(len(UNNAMED)) if client == UNNAMED else client)
        before = self._groups.get(name)
        if before is not None:
            self._end(before)
        group = self._groups[name] = Group(name, None)
        return group

    def leave(self, group: Group, member: Member) -> None:
        """A connection is closed. The group stays as long as it holds something, if it is of this machine."""
        group.leave(member)
        if group.uid is None and not group.ended:
            self._end(group)
        self.drop_if_idle(group)

    def drop_if_idle(self, group: Group) -> None:
        """Forget a group that has no connection and holds nothing."""
        if not group.members and not group.ended and not group.reserved and not group.leased:
            self._end(group)

    def close(self) -> None:
        """Watch no process any more. What groups hold stays held."""
        for group in self._groups.values():
            self._unwatch(group)

    def _watch(self, group: Group, name: tuple[int, int]) -> None:
        self._loop.add_reader(group.pidfds[name], self._gone, group, name)

    def _gone(self, group: Group, name: tuple[int, int]) -> None:
        pidfd = group.remove_process(name)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        if not group.pidfds:
            self._end(group)

    def _end(self, group: Group) -> None:
        del self._groups[group.id]
        held = group.take_all()
        self._unwatch(group)
        for member in tuple(group.members):
            member.end()
        if held:
            self._give_back(held)

    def _unwatch(self, group: Group) -> None:
        for pidfd in group.pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        group.pidfds.clear()
