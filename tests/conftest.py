"""What every test file may rely on: the long form of soaks, tests that need a GPU, and tiny engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

# Torch takes seconds to import, and most tests are without it: fixtures import where they are asked for.
if TYPE_CHECKING:
    from kvpager.engine import LLM
    from kvpager.tests.engine_cases import Case, MakeLLM


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the soaks in their long form as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        _skip(items, "full", "long, or wants free cores; --full runs it")
    if any("gpu" in item.keywords for item in items) and not _has_gpu():
        _skip(items, "gpu", "no CUDA device")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if marker in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda:0", id="gpu", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True, scope="session")
def usual_signals() -> None:
    """Ctrl-C and a hang-up reach the tests and what they start, also where the run is in the background."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True, scope="session")
def settings_of_this_machine() -> None:
    """They are not those of the tests' sidecars."""
    os.environ["KVPAGER_CONFIG"] = os.devnull
    os.environ["KVPAGER_CALIBRATION"] = "/nonexistent/calibration.json"


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and a GPU where there is one."""
    name: str = request.param
    if name != "cpu":
        import torch

        # Products in full float32, as on the CPU that the tokens are compared with.
        torch.set_float32_matmul_precision("highest")
    return name


@pytest.fixture(scope="module")
def llama(device: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A tiny Llama on a device, without a tokenizer."""
    from kvpager.tests.engine_cases import make_case

    return make_case("llama", device, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def speaking(llama: Case) -> Case:
    """The same with a tokenizer whose tokens end in the middle of words and of characters."""
    from kvpager.tests.engine_cases import byte_tokenizer

    return replace(llama, loaded=replace(llama.loaded, tokenizer=byte_tokenizer(199)))


@pytest.fixture
def made() -> Iterator[list[LLM]]:
    """Engines of a test; at its end each one's books must balance."""
    from kvpager.tests.engine_cases import check

    engines: list[LLM] = []
    yield engines
    try:
        for llm in engines:
            if not llm.closed:
                check(llm)
    finally:
        for llm in engines:
            llm.close()


@pytest.fixture
def make_llama(llama: Case, made: list[LLM]) -> MakeLLM:
    """Makes engines on the tiny Llama."""
    from kvpager.tests.engine_cases import maker

    return maker(llama, made)
