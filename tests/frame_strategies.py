"""Frames and messages of any kind, for Hypothesis."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
from hypothesis import strategies as st
from kvpager.api.messages import Flags, Hashes, Message, Statuses
from kvpager.api.wire import Failure, Notice, Reply, Request
from kvpager.kvstore.handles import Generations
from kvpager.kvstore.policy import Ids
from kvpager.tests.wire_frames import MESSAGES, error_of_each_class

__all__ = ["ANY_FRAME", "ANY_MESSAGE", "IDS", "VALUES", "values_of"]


def array(kind: Any, least: int, most: int) -> st.SearchStrategy[Any]:
    return st.lists(st.integers(least, most), max_size=20).map(lambda values: np.array(values, dtype=kind))


VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    bool: st.booleans(),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    bytes: st.binary(max_size=100),
    float: st.floats(allow_nan=False),
    dict[str, Any]: st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.integers(0, 2**63) | st.text("abc") | st.dictionaries(st.text("abc"), st.floats(allow_nan=False)),
    ),
    Hashes: st.lists(st.binary(min_size=16, max_size=16), max_size=20).map(tuple),
    Ids: array(np.int32, -(2**31), 2**31 - 1),
    Generations: array(np.int64, -(2**63), 2**63 - 1),
    Statuses: array(np.uint8, 0, 255),
    Flags: array(np.bool_, 0, 1),
}


def values_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return st.builds(kind, **{name: VALUES[hints[name]] for name in names})


IDS = st.integers(0, 2**63 - 1)
ANY_MESSAGE = st.sampled_from(MESSAGES).flatmap(values_of)
ANY_FRAME = (
    st.builds(Request, IDS, ANY_MESSAGE)
    | st.builds(Reply, IDS, ANY_MESSAGE)
    | st.builds(Notice, ANY_MESSAGE)
    | st.builds(Failure, IDS, st.sampled_from(error_of_each_class()))
)
