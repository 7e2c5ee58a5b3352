"""The digest of an engine's weights, made in a thread beside its start."""

from __future__ import annotations

import logging
import threading

import pytest
from kvpager.api.integrations.weights import Digest

pytestmark = pytest.mark.timeout(60)

LOG = logging.getLogger("kvpager.test-weights")


def test_a_digest_is_not_waited_for_longer_than_said(caplog: pytest.LogCaptureFixture) -> None:
    read = threading.Event()

    def make() -> bytes:
        assert read.wait(30)
        return b"weights"

    with caplog.at_level(logging.INFO, LOG.name):
        digest = Digest(make, LOG)
        digest.wait(0.05)
        made = [digest.value]
        assert [one.getMessage() for one in caplog.records] == [
            "kvpager: the weights are being digested; nothing is found or kept until that is done"
        ]
        read.set()
        digest.wait(30)
        made.append(digest.value)
        assert made == [None, b"weights"]
        assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [OSError("no such file"), AttributeError("no such argument")])
def test_what_cannot_be_digested_is_said_once_whatever_was_raised(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> bytes:
        raise error

    with caplog.at_level(logging.INFO, LOG.name):
        digest = Digest(make, LOG)
        digest.wait(30)
        digest.wait(30)
        assert digest.value is None
    (said,) = caplog.records
    assert "the weights cannot be digested" in said.getMessage()
    assert str(error) in caplog.text
