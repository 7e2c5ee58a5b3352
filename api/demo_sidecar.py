"""``kvpager demo --sidecar``: engines in processes of their own, on one sidecar's host memory.

What the engines do is in `demo_chats`; here they and the sidecar are started and ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..tiers.errors import ServiceUnavailableError
from ..tiers.memory import format_bytes
from .client import connect
from .demo_folder import demo_folder
from .serve import usual_bytes
from .serve_settings import without_settings

if TYPE_CHECKING:
    from rich.console import Console

    from .demo_chats import Chats, Settings
    from .processes import Interruptions

__all__ = ["run_on_sidecar"]

_HOST_BYTES: Final = 1 << 30
_COLD_BYTES: Final = 8 << 30
_STOP_SECONDS: Final = 60.0


def run_on_sidecar(
    console: Console, interruptions: Interruptions, settings: Settings, socket: str | None
) -> int:
    """The demo on a sidecar; returns its exit code.

    Args:
        socket: that of a sidecar to use; None starts one, with the settings' cold tier.
    """
    from .demo_chats import first_talks, on_sidecar, uncached
    from .demo_report import report_answers, tier_table

    with _sidecar(interruptions, settings, socket) as place:
        console.print(f"One sidecar on {place}, {_pool_words(place)}; every engine is a process of its own.")

        def turn(talks: list[Any], number: int, name: str) -> Chats:
            done: Chats = interruptions.run_apart(on_sidecar, settings, place, talks, 0, number, name, False)
            return done

        first = turn(first_talks(settings.sessions), 0, "first engine")
        console.print("\n[bold]It has ended; another one goes on with every chat.[/]")
        second = turn(first.talks, 1, "second engine")
        console.print("\n[bold]It has ended; now two at once, each with half of the chats.[/]")
        half = len(second.talks) // 2
        third, fourth = interruptions.run_all_apart(
            on_sidecar,
            [
                (settings, place, second.talks[:half], 0, 2, "third engine", False),
                (settings, place, second.talks[half:], half, 2, "fourth engine", True),
            ],
        )
        pool = _pool_words(place)
    engines = {"first engine": first, "second engine": second, "third engine": third, "fourth engine": fourth}
    turns = [turn for chats in engines.values() for turn in chats.turns]
    truth = interruptions.run_apart(uncached, settings, turns)
    console.print(tier_table(engines, truth.seconds))
    console.print(f"At the end the sidecar had {pool}.")
    code = report_answers(console, list(engines.values()), truth)
    reused = sum(turn.completion.cached.host + turn.completion.cached.cold for turn in second.turns)
    if not reused:
        console.print("[bold red]The second engine found nothing of the first one's in the sidecar.[/]")
        return 1
    return code


@contextmanager
def _sidecar(interruptions: Interruptions, settings: Settings, socket: str | None) -> Iterator[str]:
    """The socket of a sidecar: of one that is there, or of one that ends with this.

    Raises:
        ServiceUnavailableError: it does not start.
    """
    if socket is not None:
        yield socket
        return
    with ExitStack() as rest:
        folder = rest.enter_context(demo_folder(interruptions))
        with interruptions.put_off():
            place = str(Path(folder, "sidecar.sock"))
            process = _start(place, settings.cold)
            rest.callback(_stop, process)
        _await_listening(process)
        yield place


def _start(place: str, cold: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "kvpager", "serve", "--socket", place, "--arena", "memory"]
    command += ["--host-bytes", str(min(_HOST_BYTES, usual_bytes(None))), "--admin", "off"]
    # Nobody stops it where this process is killed.
    command += ["--with-process", str(os.getpid())]
    if "://" not in cold:
        cold = f"disk://{os.path.abspath(cold)}"
    command += ["--cold", cold]
    if cold.startswith("disk://"):
        command += ["--cold-bytes", str(_COLD_BYTES)]
    # Deaf to Ctrl-C, which reaches every process of the terminal: this one hears it, and ends the other.
    return subprocess.Popen(
        command, env=without_settings(os.environ), stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _await_listening(process: subprocess.Popen[str]) -> None:
    said = []
    for line in process.stderr or ():
        if "listening on" in line:
            return
        said.append(line.strip())
    raise ServiceUnavailableError(f"the sidecar did not start: {' '.join(said) or 'it said nothing'}")


def _pool_words(place: str) -> str:
    """What a sidecar has, for people."""
    with connect(place, name="kvpager demo") as pool:
        stats = pool.stats()
    size = format_bytes(stats["arena"]["capacity_bytes"])
    cold = f", {stats['cold']['puts']} of them copied to its cold tier" if "cold" in stats else ""
    return f"{size} of host memory for {stats['host']['committed']} blocks{cold}"
