"""A real vLLM as tests start it: in the environment that has it, with its own process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

__all__ = ["Engine", "end_session", "group_of", "require_vllm", "vllm_environment"]

_ROOT = Path(__file__).resolve().parents[1]
_MARK = "@kvpager@ "


def require_vllm() -> str:
    """The Python of the environment that has vLLM.

    The calling test is skipped where there is none, and fails where one is named and is not there, as
    `scripts/test` does.
    """
    named = os.environ.get("KVPAGER_VLLM_PYTHON")
    if named:
        assert Path(named).exists(), f"KVPAGER_VLLM_PYTHON names {named}, which is not there"
        return named
    python = _ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no environment with vLLM (scripts/setup vllm, or KVPAGER_VLLM_PYTHON)")
    return str(python)


def vllm_environment() -> dict[str, str]:
    """Variables of a process that has vLLM: on the CPU, with one thread, and without a word to anybody."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {
        **kept,
        "PYTHONPATH": str(_ROOT / ".links"),
        "PYTHONSAFEPATH": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


class Engine:
    """One vLLM. A context manager, at whose end it is killed.

    Args:
        folder: where its log goes, ``vllm.log``.
        model: folder of a model; None: vLLM is imported, and `open` makes an engine.
        url: of the sidecar; None: it has no connector.
        options: of ``vllm.LLM``, and ``extra`` for the connector.
        environment: variables beside those that every engine has.
    """

    def __init__(
        self,
        folder: Path,
        model: Path | None = None,
        url: str | None = None,
        *,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        values = {} if model is None else _options(model, url, options)
        self._log = (folder / "vllm.log").open("a")
        self.process = subprocess.Popen(
            [require_vllm(), str(_ROOT / "tests" / "vllm_engine.py"), json.dumps(values)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env={
                **vllm_environment(),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                **(environment or {}),
            },
        )
        self._folder = folder

    def ready(self) -> Self:
        """Returns when it serves."""
        assert self._read() == "ready"
        return self

    def open(self, model: Path, url: str | None = None, **options: Any) -> Self:
        """Another engine in its process, in place of the one before."""
        assert self.ask("open", **_options(model, url, options)) == "ready"
        return self

    def ask(self, call: str, **values: Any) -> Any:
        """What `tests/vllm_engine.py` answers to a call."""
        self.send(call, **values)
        return self._read()

    def send(self, call: str, **values: Any) -> None:
        """Begin a call, whose answer `answer` waits for."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": call, **values}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return self._read()

    def count(self, name: str) -> float:
        """A counter of the connector's."""
        found: dict[str, float] = self.ask("metrics")
        return found[f"vllm:kvpager_{name}"]

    @property
    def log(self) -> str:
        if not self._log.closed:
            self._log.flush()
        return (self._folder / "vllm.log").read_text()

    def close(self) -> None:
        """It ends without a word, and its processes with it."""
        end_session(self.process)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
        if not self._log.closed:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            self._log.write(line)
        raise AssertionError(f"vLLM ended:\n{self.log[-4000:]}")


def _options(model: Path, url: str | None, options: dict[str, Any]) -> dict[str, Any]:
    return {"model": str(model), **({"url": url} if url else {}), **options}


def group_of(leader: int) -> list[int]:
    """The processes of a session: vLLM's workers start more of them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


def end_session(leader: subprocess.Popen[Any]) -> None:
    """Kill a process and those that it started, and remove what they leave behind."""
    shared = _shared_memory(leader.pid)
    for pid in group_of(leader.pid):
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    leader.wait()
    for path in shared:
        path.unlink(missing_ok=True)


def _shared_memory(leader: int) -> set[Path]:
    """What its processes have of Python's shared memory, which those that are killed leave behind."""
    found = set()
    for pid in group_of(leader):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # it has ended
            continue
        found |= {
            Path(line.split()[5])
            for line in maps.splitlines()
            if "/dev/shm/psm_" in line or "/dev/shm/sem." in line
        }
    return found
