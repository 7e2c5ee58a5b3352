from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.kvstore.tables import BlockTable
from kvpager.tiers.address import FAR, INSTALL, TAG_MASK
from kvpager.tiers.errors import CapacityError


def words(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def test_tags_lie_in_the_bits_that_alignment_leaves_free() -> None:
    assert TAG_MASK == 127
    assert FAR & INSTALL == 0
    assert (FAR | INSTALL) & ~TAG_MASK == 0


def test_rows_are_given_lowest_first() -> None:
    table = BlockTable(4)
    assert [table.take_row() for _ in range(4)] == [0, 1, 2, 3]
    for row in (2, 0, 3):
        table.give_row(row)
    assert table.rows_in_use.tolist() == [1]
    assert table.free_rows == 3
    assert [table.take_row() for _ in range(3)] == [0, 2, 3]


def test_a_full_table_says_so() -> None:
    table = BlockTable(1)
    table.take_row()
    with pytest.raises(CapacityError, match="all 1 rows"):
        table.take_row()


def test_a_row_that_is_given_back_is_empty() -> None:
    table = BlockTable(2)
    row = table.take_row()
    table.set(row, 0, words(128, 256))
    table.give_row(row)
    assert table.take_row() == row
    assert table.row(row).tolist() == []


def test_a_table_widens_where_a_row_outgrows_it_and_keeps_its_words() -> None:
    table = BlockTable(2, width=2)
    for row in (table.take_row(), table.take_row()):
        table.set(row, 0, words(128, 256))
    table.append(np.array([0, 1]), words(384, 512))
    table.set(0, 3, words(*range(640, 640 + 128 * 9, 128)))
    assert table.row(0).tolist() == [128, 256, 384, *range(640, 640 + 128 * 9, 128)]
    assert table.row(1).tolist() == [128, 256, 512]


def test_a_truncated_row_goes_on_from_where_it_was_cut() -> None:
    table = BlockTable(1)
    row = table.take_row()
    table.set(row, 0, words(128, 256, 384))
    table.truncate(row, 1)
    table.append(np.array([row]), words(512))
    assert table.row(row).tolist() == [128, 512]


def test_changes_are_not_kept_where_nobody_takes_them() -> None:
    table = BlockTable(1)
    table.set(table.take_row(), 0, words(128))
    assert [len(part) for part in table.take_changes()] == [0, 0, 0]


row_steps = st.lists(
    st.tuples(st.sampled_from(("set", "append", "put", "mirror")), st.integers(0, 3), st.integers(0, 9)),
    max_size=40,
)


@given(steps=row_steps)
@settings(max_examples=80, deadline=None)
def test_a_mirror_that_takes_the_changes_has_the_words_of_every_row(
    steps: list[tuple[str, int, int]],
) -> None:
    table = BlockTable(4, width=3, track_changes=True)
    model: list[list[int]] = [[] for _ in range(4)]
    for row in range(4):
        assert table.take_row() == row
    mirror = np.zeros((4, 200), dtype=np.int64)
    new = 0
    for name, row, number in [*steps, ("mirror", 0, 0)]:
        new += 128
        if name == "set":
            first = min(number, len(model[row]))
            table.set(row, first, words(new, new + 1))
            model[row][first : first + 2] = [new, new + 1]
        elif name == "append":
            rows = np.arange(row + 1)
            table.append(rows, np.full(row + 1, new))
            for one in rows.tolist():
                model[one].append(new)
        elif name == "put" and model[row]:
            column = number % len(model[row])
            table.put(np.array([row]), np.array([column]), words(new))
            model[row][column] = new
        elif name == "mirror":
            rows, columns, values = table.take_changes()
            mirror[rows, columns] = values
            for one in range(4):
                assert mirror[one, : len(model[one])].tolist() == model[one]
        assert [table.row(one).tolist() for one in range(4)] == model
