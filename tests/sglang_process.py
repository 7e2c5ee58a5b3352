"""SGLang's parts as tests start them: in the environment that has it, with a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

__all__ = ["SGLang", "require_sglang"]

_ROOT = Path(__file__).resolve().parents[1]
_MARK = "@kvpager@ "


def require_sglang() -> str:
    """The Python of the environment that has SGLang; skips the calling test where there is none."""
    named = os.environ.get("KVPAGER_SGLANG_PYTHON")
    python = Path(named) if named else _ROOT / ".venv-sglang" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no environment with SGLang (scripts/setup sglang, or KVPAGER_SGLANG_PYTHON)")
    return str(python)


class SGLang:
    """One process with SGLang. A context manager, at whose end it is killed.

    Args:
        folder: where its log goes, ``sglang.log``, a model's weights, and in ``hub`` a Hugging Face cache.
    """

    def __init__(self, folder: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.folder = folder
        self._path = folder / "sglang.log"
        weights = folder / "weights" / "model.safetensors"
        weights.parent.mkdir()
        weights.write_bytes(b"the same for every process")
        self._log = self._path.open("a")
        self.process = subprocess.Popen(
            [require_sglang(), str(_ROOT / "tests" / "sglang_engine.py"), str(weights)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **kept,
                "PYTHONPATH": str(_ROOT / ".links"),
                "PYTHONSAFEPATH": "1",
                "HF_HUB_OFFLINE": "1",
                "HF_HUB_CACHE": str(folder / "hub"),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
        )
        assert self._read() == "ready"

    def ask(self, call: str, *names: str, **values: Any) -> Any:
        """What `tests/sglang_engine.py` answers to a call, of the rank of this name."""
        if names:
            values["name"] = names[0]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": call, **values}) + "\n")
        self.process.stdin.flush()
        return self._read()

    @property
    def log(self) -> str:
        return self._path.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._log):
            if stream is not None:
                stream.close()

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
        raise AssertionError(f"SGLang ended:\n{self.log[-4000:]}")
