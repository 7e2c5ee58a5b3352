"""Who reads a connection's socket: turns of callers and of the connection's thread, over real sockets."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import kvpager
import pytest
from kvpager.api.messages import Hello, OpenSpace, SpaceOpened, Welcome
from kvpager.api.read_turns import ReadTurns
from kvpager.api.wire import MAX_FRAME, VERSION, FrameReader, Reply, Request, encode
from kvpager.kvstore.hashing import space_id
from kvpager.tests.raw_client import LAYOUT, names
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.errors import ProtocolError


@pytest.fixture
def lock() -> threading.Condition:
    return threading.Condition(threading.Lock())


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServeProcess]:
    """A sidecar in a process of its own."""
    with ServeProcess(tmp_path / "socket") as process:
        yield process


@pytest.fixture
def turns(lock: threading.Condition) -> Iterator[ReadTurns]:
    turns = ReadTurns(lock)
    yield turns
    turns.close()


@pytest.fixture
def pair(turns: ReadTurns, lock: threading.Condition) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The socket that is read, and the other side's."""
    one, other = socket.socketpair()
    with one, other:
        with lock:
            turns.attach(one)
        yield one, other
        with lock:
            turns.detach()


def test_the_thread_is_woken_by_what_comes_while_nobody_waits(
    turns: ReadTurns, lock: threading.Condition, pair: tuple[socket.socket, socket.socket]
) -> None:
    with lock:
        assert turns.look(writing=False) is None
    assert not turns.wait(0.0)
    pair[1].send(b"an event")
    assert turns.wait(1.0)


def test_one_caller_reads_and_the_thread_is_not_woken_for_it(
    turns: ReadTurns, lock: threading.Condition, pair: tuple[socket.socket, socket.socket]
) -> None:
    with lock:
        assert turns.come() is pair[0]
        assert turns.come() is None  # the second waits to be told
        assert not turns.begin()
        pair[1].send(b"a reply")
    assert turns.readable(1.0)
    turns.wait(0.0)  # a caller came: the thread is told once
    with lock:
        assert turns.look(writing=False) is not None
    assert not turns.wait(0.01)
    with lock:
        turns.end()
        turns.leave()


def test_the_thread_reads_on_for_callers_that_still_wait(
    turns: ReadTurns, lock: threading.Condition, pair: tuple[socket.socket, socket.socket]
) -> None:
    with lock:
        turns.come()
        turns.come()
        pair[1].send(b"the second's reply")
        turns.end()
        turns.leave()
    assert turns.wait(1.0)
    with lock:
        assert turns.begin()
        assert turns.come() is None  # in the midst of that
        turns.end()


def test_the_thread_watches_again_when_callers_come_no_more(
    turns: ReadTurns, lock: threading.Condition, pair: tuple[socket.socket, socket.socket]
) -> None:
    with lock:
        turns.come()
        turns.end()
        turns.leave()
        assert turns.look(writing=False) is not None
        pair[1].send(b"an event")
        assert turns.look(writing=False) is None
    assert turns.wait(1.0)


def test_the_thread_does_not_look_while_one_caller_waits_for_long(
    turns: ReadTurns, lock: threading.Condition, pair: tuple[socket.socket, socket.socket]
) -> None:
    with lock:
        turns.come()
        assert turns.look(writing=False) is not None
        assert turns.look(writing=False) is None
        turns.wait(0.0)
        turns.end()
        turns.leave()
    turns.wait(None)  # it is woken to watch
    with lock:
        turns.look(writing=False)
    pair[1].send(b"an event")
    assert turns.wait(1.0)


def test_a_socket_is_not_closed_under_a_caller_that_reads_it(
    turns: ReadTurns, lock: threading.Condition, pair: tuple[socket.socket, socket.socket]
) -> None:
    came = threading.Event()
    read: list[bytes] = []

    def caller() -> None:
        with lock:
            connected = turns.come()
        assert connected is not None
        came.set()
        assert turns.readable(20.0)
        read.append(connected.recv(1))
        with lock:
            turns.end()
            turns.leave()

    thread = threading.Thread(target=caller)
    thread.start()
    came.wait()
    with lock:
        turns.detach()
    assert read == [b""]
    thread.join()


def test_answers_reach_their_own_callers_while_one_waits_for_long(serving: ServeProcess) -> None:
    with kvpager.connect(serving.path, timeout=20.0, strict=True) as client:
        space = client.space(LAYOUT)
        reservation = space.reserve(names(0, 64), wait=10.0)
        reservation.commit()
        wrong: list[int] = []

        def work(count: int) -> None:
            for _ in range(100):
                with space.match(names(0, count)) as lease:
                    if lease.slots.tolist() != reservation.slots[:count].tolist():
                        wrong.append(count)

        threads = [threading.Thread(target=work, args=(count,)) for count in (1, 7, 30, 64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert client.counters.connects == 1


class _InterruptedError(Exception):
    pass


def test_a_caller_that_is_interrupted_while_it_waits_breaks_nothing(serving: ServeProcess) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with kvpager.connect(serving.path, timeout=20.0, strict=True) as client:
            space = client.space(LAYOUT)
            space.reserve(names(0, 3), wait=10.0).commit()
            serving.pause()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(_InterruptedError):
                space.match(names(0, 3))
            serving.resume()
            with space.match(names(0, 3)) as lease:
                assert len(lease) == 3
            assert client.counters.connects == 1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_what_a_caller_cannot_make_out_is_its_error_and_ends_the_connection(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        answering = threading.Thread(target=_answer_a_match_with_nonsense, args=(listening,))
        answering.start()
        with kvpager.connect(path, timeout=20.0, strict=True) as client:
            space = client.space(LAYOUT)
            with pytest.raises(ProtocolError):
                space.match(names(0, 3))
            answering.join()  # it saw the end of the connection
            assert not client.ready


def _answer_a_match_with_nonsense(listening: socket.socket) -> None:
    connected, _ = listening.accept()
    listening.close()
    arena = os.memfd_create("arena")
    os.ftruncate(arena, 1 << 20)
    reader = FrameReader()
    with connected:
        while data := connected.recv(1 << 16):
            for frame in reader.feed(data):
                assert isinstance(frame, Request)
                if isinstance(frame.message, Hello):
                    welcome = encode(
                        Reply(frame.id, Welcome(VERSION, b"b" * 16, 1 << 20, 1 << 20, MAX_FRAME))
                    )
                    socket.send_fds(connected, [welcome], [arena])
                elif isinstance(frame.message, OpenSpace):
                    opened = SpaceOpened(0, space_id(LAYOUT, "", ""), (1 << 20) // LAYOUT.block_bytes)
                    connected.sendall(encode(Reply(frame.id, opened)))
                else:
                    connected.sendall(b"\xff" * 8)
    os.close(arena)
