"""KV that one process computed into a sidecar's memory, attended to in place by another after a kill.

On a GPU kernels of both processes, each with a CUDA context of its own, write and read the memory; without
one the reference kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kvpager.tests.attending_process import BLOCKS, LAYOUT, LENGTHS, AttendingProcess, answers_of
from kvpager.tests.serve_process import ServeProcess

HALF = BLOCKS // 2
TOLERANCE = 2e-3
"""Of float16, as in the kernels' own tests."""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServeProcess]:
    with ServeProcess(tmp_path / "socket") as process:
        yield process


def error(got: npt.NDArray[np.float16], want: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def check_answers(reader: AttendingProcess) -> npt.NDArray[np.float16]:
    """Attention in place is right, and the same bits as over the process's own memory."""
    there = reader.call("attend")
    assert np.array_equal(there.view(np.int16), reader.call("attend_to_own").view(np.int16))
    assert error(there, answers_of()) < TOLERANCE
    assert error(there, reader.call("attend_by_reference").astype(np.float64)) < TOLERANCE
    return np.asarray(there)


def test_another_process_attends_in_place_to_what_was_written_around_a_kill(
    serving: ServeProcess, device: str
) -> None:
    with AttendingProcess(serving.path, device) as writer, AttendingProcess(serving.path, device) as reader:
        assert writer.call("pid") != reader.call("pid")
        assert writer.call("reserve") == BLOCKS
        writer.call("write", 0, HALF)
        writer.call("commit", 0, HALF)
        serving.kill()
        for each in (writer, reader):
            each.call("await_death")
        # Memory that is mapped is there without the sidecar too.
        writer.call("copy_in", HALF, BLOCKS)
        serving.start()
        assert writer.call("await_life") == reader.call("await_life") == 0
        assert sum(reader.call("resident")) < BLOCKS
        writer.call("commit", HALF, BLOCKS)
        answers = check_answers(reader)
        # What the writer finds is the same.
        assert np.array_equal(answers.view(np.int16), writer.call("attend").view(np.int16))


def test_what_was_committed_before_its_writer_and_the_sidecar_were_killed_is_attended_to_in_place(
    serving: ServeProcess, device: str
) -> None:
    counts = [LAYOUT.blocks_for(length) for length in LENGTHS]
    kept = counts[0] + counts[1]
    with AttendingProcess(serving.path, device) as reader:
        with AttendingProcess(serving.path, device) as writer:
            assert writer.call("pid") != reader.call("pid")
            assert writer.call("reserve") == BLOCKS
            writer.call("write", 0, kept)
            writer.call("commit", 0, kept)
            writer.begin("write_for_ever", kept, BLOCKS)
            serving.kill()
            writer.kill()
        reader.call("await_death")
        serving.start()
        assert reader.call("await_life") == 0
        assert reader.call("resident") == [*counts[:2], 0]
        # What its killed writer had reserved is free; what it committed is not written again.
        assert reader.call("reserve") == counts[2]
        reader.call("write", kept, BLOCKS)
        reader.call("commit", kept, BLOCKS)
        check_answers(reader)
