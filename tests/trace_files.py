"""The shared trace of real chats, where it is, and small traces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kvpager.kvstore.trace import Trace, TraceEvent

__all__ = ["conversation_trace", "trace_of"]


def conversation_trace() -> Path:
    """Mooncake's conversation trace: in ``$KVPAGER_TRACES``, or in a folder ``shared`` beside the
    checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    folder = Path(os.environ.get("KVPAGER_TRACES") or beside)
    path = folder / "mooncake_conversation.jsonl"
    if not path.exists():
        pytest.skip(f"there is no {path}: $KVPAGER_TRACES names the folder that has it")
    return path


def trace_of(*chains: Sequence[int], block_size: int = 4) -> Trace:
    """Requests of these blocks, one a second."""
    return Trace.of_events(
        (
            TraceEvent(float(at), np.array(chain, np.uint64), len(chain), len(chain), len(chain) * block_size)
            for at, chain in enumerate(chains)
        ),
        block_size,
    )
