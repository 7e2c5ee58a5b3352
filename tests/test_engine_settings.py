"""What an engine says of settings and requests that it cannot use: errors of kvpager that name them."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpager.engine.llm import LLM
from kvpager.engine.loader import load_model
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.sequence import SequenceState
from kvpager.tests.engine_cases import (
    GREEDY,
    Case,
    MakeLLM,
    check_nothing_is_held,
    finish,
    maker,
    run_until,
)
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import (
    CapacityError,
    ConfigError,
    KVPagerError,
    MemoryUnavailableError,
    ModelError,
    RequestError,
)
from kvpager.tiers.extras import how_to_install

NO_INTEGERS = ("5", 5.5, True, math.nan, [5], b"5", 1j)
NO_SECONDS = ("5", True, math.nan, math.inf, -1.0, [5], None, 10**400)
NO_TEXTS = (5, b"text", ["text"], "", "half a character: \ud83d")


def wrong(settings: dict[str, tuple[object, ...]]) -> list[Any]:
    """Parameters of a test: each setting with each of its values."""
    return [
        pytest.param(name, value, id=f"{name}={value!r:.40}")
        for name, values in settings.items()
        for value in values
    ]


# Settings of an engine


@pytest.mark.parametrize(
    ("name", "value"),
    wrong(
        {
            "device": (None, 5, "", "abacus", "meta", b"cpu", ["cpu"]),
            "dtype": (None, 5, "", "foo", "int8", np.float32, ["float32"]),
            "block_size": (*NO_INTEGERS, None, 0),
            "device_blocks": (*NO_INTEGERS, 0),
            "device_bytes": (*NO_INTEGERS, 0),
            "host_bytes": (*NO_INTEGERS, -1),
            "cold": (5, "redis://localhost", DiskColdTier, {}),
            "max_sequences": (*NO_INTEGERS, None, 0, 1 << 40),
            "max_tokens": (*NO_INTEGERS, 1, 10**9),
            "step_tokens": (*NO_INTEGERS, None, 0),
            "load_seconds": NO_SECONDS,
            "cuda_graphs": (None, 1, "yes", [True]),
            "gate": (None, 1, "yes", [True]),
            "calibration": (5, "", b"costs.json", ["costs.json"]),
            "tenant": (None, "tenant", 5, ["t"], bytearray(b"t")),
        }
    ),
)
def test_a_wrong_setting_of_an_engine_is_refused_by_its_name(llama: Case, name: str, value: Any) -> None:
    settings: dict[str, Any] = {"device": llama.device, "device_blocks": 8, "host_bytes": 1 << 20}
    if name == "device_bytes":
        settings["device_blocks"] = None
    with pytest.raises(ConfigError) as caught:
        LLM(llama.loaded, **(settings | {name: value}))
    assert caught.value.setting == name


@pytest.mark.parametrize(
    ("name", "value"),
    wrong(
        {
            "model": (None, 5, "", b"model", ["model"], "a\0b"),
            "device": (None, 5, "", "meta"),
            "dtype": (None, "foo", np.float32),
        }
    ),
)
def test_a_wrong_argument_of_load_model_is_refused_by_its_name(tmp_path: Path, name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"path_or_name": tmp_path} | {
        "path_or_name" if name == "model" else name: value
    }
    with pytest.raises(ConfigError) as caught:
        load_model(**arguments)
    assert caught.value.setting == name


@pytest.mark.parametrize("model", [None, 5, "", b"model"])
def test_what_is_no_model_is_refused_by_an_engine_too(model: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model, device="cpu")
    assert caught.value.setting == "model"


def test_a_loaded_model_keeps_its_dtype(llama: Case, make_llama: MakeLLM) -> None:
    with pytest.raises(
        ConfigError, match="dtype: the model was loaded in float32, so it cannot run in float16"
    ):
        make_llama(dtype="float16")
    assert make_llama(dtype="float32").layout.dtype == "float32"


def test_numbers_of_numpy_are_numbers(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama(
        block_size=np.int64(8),
        device_blocks=np.int32(160),
        host_bytes=np.int64(8 << 20),
        max_sequences=np.uint8(12),
        load_seconds=np.float32(1.5),
    )
    numbers: dict[str, Any] = {
        "max_tokens": np.int64(21),
        "temperature": np.float32(0.0),
        "seed": np.int64(5),
        "ignore_eos": np.True_,
    }
    params = SamplingParams(**numbers)
    assert params == replace(GREEDY, seed=5)
    assert llm.generate([llama.prompts[4]], params)[0].token_ids == llama.truth[4]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"block_size": 0}, ConfigError, "block_size"),
        ({"block_size": -4}, ConfigError, "block_size"),
        ({"device_blocks": 0}, ConfigError, "device_blocks"),
        ({"device_blocks": -1}, ConfigError, "device_blocks"),
        ({"device_blocks": None, "device_bytes": -1}, ConfigError, "device_bytes"),
        ({"device_blocks": None, "device_bytes": 10}, ConfigError, "device_bytes"),
        ({"device_blocks": 9, "device_bytes": 1 << 20}, ConfigError, "device_bytes"),
        ({"device_blocks": None, "device_bytes": 10**30}, ConfigError, "^device_bytes: must be at most"),
        (
            {"device_blocks": None, "device_bytes": 1 << 42},
            MemoryUnavailableError,
            r"^device_bytes: \d+ blocks of .* are 4\.0 TiB, but only",
        ),
        ({"device_blocks": 1 << 30}, MemoryUnavailableError, "^device_blocks: 1073741824 blocks of"),
        ({"host_bytes": -1}, ConfigError, "host_bytes"),
        ({"host_bytes": 1 << 60}, MemoryUnavailableError, "host_bytes|memory"),
        ({"device_blocks": 1 << 28}, MemoryUnavailableError, "device|memory"),
        ({"max_sequences": 0}, ConfigError, "max_sequences"),
        ({"max_sequences": -3}, ConfigError, "max_sequences"),
        ({"max_tokens": 1}, ConfigError, "max_tokens"),
        ({"max_tokens": 513}, ConfigError, "max_tokens: must be between 2 and the model's 512"),
        ({"step_tokens": 0}, ConfigError, "step_tokens"),
        ({"load_seconds": -1.0}, ConfigError, "load_seconds"),
        ({"policy": "mru"}, ConfigError, "policy"),
        ({"device": "abacus"}, ConfigError, "device"),
        ({"device": "meta"}, ConfigError, "device"),
        ({"device": "cuda:99"}, ConfigError, "device"),
    ],
)
def test_bad_settings_are_refused(
    make_llama: MakeLLM, settings: dict[str, Any], error: type[KVPagerError], said: str
) -> None:
    with pytest.raises(error, match=said):
        make_llama(**settings)


def test_bad_models_and_missing_host_memory_are_refused(make_llama: MakeLLM, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model"):
        LLM(tmp_path / "nothing", device="cpu")
    with pytest.raises(ConfigError, match="device"):
        LLM(tmp_path / "nothing", device="cuda:99")
    with (
        closing(DiskColdTier(tmp_path, capacity_bytes=1 << 20)) as cold,
        pytest.raises(ConfigError, match="host_bytes: a cold tier needs host memory"),
    ):
        make_llama(cold=cold, host_bytes=0)


# Requests


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([[]], "empty"),
        ([3, 4, 199], "token ids must be from 0 to 198"),
        ([3, -1], "token ids must be from 0 to 198"),
        ([3, 2**70], "prompt is text, token ids, or messages"),
        ([3, 2.5], "prompt is text, token ids, or messages"),
        ([[3, [4]]], "prompt is text, token ids, or messages"),
        ([[[3], [4]]], "prompt is text, token ids, or messages"),
        (np.zeros((2, 2), dtype=np.int32), "prompt is text, token ids, or messages"),
        (np.array(3), "prompt is text, token ids, or messages"),
        ([2] * 512, "max_tokens allows 511"),
        ("words", "no tokenizer"),
        ([{"role": "user", "content": "words"}], "no chat template"),
        ([{"role": "user", "content": "words"}, 4], "messages"),
        ({"role": "user"}, "prompt is text, token ids, or messages"),
        (5, "prompt is text, token ids, or messages"),
        (None, "prompt is text, token ids, or messages"),
    ],
)
def test_bad_prompts_are_refused(make_llama: MakeLLM, prompt: Any, said: str) -> None:
    llm = make_llama()
    with pytest.raises(RequestError, match=said):
        llm.generate(prompt, GREEDY)
    check_nothing_is_held(llm)


def test_no_prompts_get_no_answers(make_llama: MakeLLM) -> None:
    assert make_llama().generate([]) == []


def test_text_that_no_tokenizer_takes_is_refused(speaking: Case, made: list[LLM]) -> None:
    llm = maker(speaking, made)()
    with pytest.raises(RequestError, match="the prompt cannot be tokenized"):
        llm.submit("half a character: \ud83d")
    with pytest.raises(RequestError, match="empty"):
        llm.submit("")
    check_nothing_is_held(llm)


def test_a_bad_prompt_among_good_ones_leaves_none_behind(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama()
    with pytest.raises(RequestError, match="empty"):
        llm.generate([llama.prompts[0], []], GREEDY)
    check_nothing_is_held(llm)


def test_bad_params_are_refused(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama()
    with pytest.raises(RequestError, match="stop_token_ids must be from 0 to 198, got 199"):
        llm.submit(llama.prompts[0], replace(GREEDY, stop_token_ids=(199,), min_tokens=2))
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.submit(llama.prompts[0], replace(GREEDY, stop="words"))
    with pytest.raises(RequestError, match="2 prompts with 1 sampling params"):
        llm.generate(llama.prompts[:2], [GREEDY])
    with pytest.raises(RequestError, match="2 prompts with 1 sessions"):
        llm.generate(llama.prompts[:2], GREEDY, sessions=["a"])
    with pytest.raises(RequestError, match="no tokenizer"):
        next(llm.stream(llama.prompts[0], GREEDY))
    check_nothing_is_held(llm)


def test_bad_forks_are_refused(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama(max_sequences=2, host_bytes=0, device_blocks=12)
    sequence = llm.submit(llama.prompts[4], GREEDY)
    with pytest.raises(RequestError, match="is waiting; only a decoding one forks"):
        llm.fork(sequence)
    run_until(llm, sequence, SequenceState.DECODING)
    for _ in range(3):
        llm.step()
    with pytest.raises(RequestError, match="4 tokens already; max_tokens allows 4"):
        llm.fork(sequence, replace(GREEDY, max_tokens=4))
    with pytest.raises(RequestError, match="device_blocks"):
        llm.fork(sequence, replace(GREEDY, max_tokens=400))
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.fork(sequence, replace(GREEDY, stop="words"))
    twin = llm.fork(sequence)
    with pytest.raises(CapacityError, match="rows"):
        llm.fork(sequence)
    with pytest.raises(RequestError, match="has not finished"):
        llm.completion(sequence)
    assert [one.token_ids for one in finish(llm, [sequence, twin])] == [llama.truth[4]] * 2
    with pytest.raises(RequestError, match="is finished"):
        llm.fork(sequence)
    check_nothing_is_held(llm)


@pytest.mark.parametrize(
    ("name", "value"),
    wrong(
        {
            "max_tokens": (*NO_INTEGERS, None, 0),
            "temperature": ("1", None, True, math.nan, math.inf, -0.1, [1.0], 10**400),
            "top_k": (*NO_INTEGERS, 0, 1 << 40),
            "top_p": ("1", None, True, math.nan, math.inf, 0.0, -0.5, 1.1, [1.0]),
            "seed": (*NO_INTEGERS, -1, 1 << 63),
            "stop": (5, None, b"text", [5], [""], ["a", None], "", 1.5, {"a": 1}),
            "stop_token_ids": (
                5,
                None,
                "12",
                b"12",
                ["a"],
                [1.5],
                [True],
                [-1],
                np.array(3),
                np.array([1.5]),
            ),
            "ignore_eos": (None, 1, "yes", 0.0),
            "min_tokens": (*NO_INTEGERS, None, -1, 257),
        }
    ),
)
def test_a_wrong_sampling_parameter_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.setting == name


def test_stop_tokens_may_come_in_any_list() -> None:
    for tokens in ([3, 4], (3, 4), {3, 4}, np.array([3, 4])):
        params = SamplingParams(stop_token_ids=tokens)  # type: ignore[arg-type]
        assert sorted(params.stop_token_ids) == [3, 4]
        assert {type(token) for token in params.stop_token_ids} == {int}


@pytest.mark.parametrize(
    ("name", "value"),
    wrong(
        {
            "params": ("x", 5, {}, ["x", "y"], [None, None], {"max_tokens": 4}),
            "sessions": (5, "ab", [5, 6], [b"a", b"b"], ["", "b"], ["a", "\ud83d"], {"a": 1, "b": 2}),
        }
    ),
)
def test_a_wrong_argument_of_generate_is_refused_before_anything_runs(
    llama: Case, make_llama: MakeLLM, name: str, value: Any
) -> None:
    llm = make_llama()
    with pytest.raises(ConfigError) as caught:
        llm.generate(llama.prompts[:2], **{name: value})
    assert caught.value.setting == name
    check_nothing_is_held(llm)


def test_a_session_takes_one_turn_in_a_call(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama()
    with pytest.raises(RequestError, match="sessions: 'a' is named twice"):
        llm.generate(llama.prompts[:3], GREEDY, sessions=["a", "b", "a"])
    done = llm.generate(llama.prompts[:3], GREEDY, sessions=["a", None, None])
    assert [answer.token_ids for answer in done] == llama.truth[:3]


@pytest.mark.parametrize(
    ("name", "value"), wrong({"params": ("x", 5, [GREEDY]), "session": NO_TEXTS, "salt": (None, "salt", 5)})
)
def test_a_wrong_argument_of_submit_is_refused_by_its_name(
    llama: Case, make_llama: MakeLLM, name: str, value: Any
) -> None:
    llm = make_llama()
    with pytest.raises(ConfigError) as caught:
        llm.submit(llama.prompts[0], **{name: value})
    assert caught.value.setting == name
    check_nothing_is_held(llm)


@pytest.mark.parametrize(("name", "value"), wrong({"params": ("x", 5), "session": NO_TEXTS}))
def test_a_wrong_argument_of_stream_is_refused_by_its_name(
    speaking: Case, made: list[LLM], name: str, value: Any
) -> None:
    llm = maker(speaking, made)()
    with pytest.raises(ConfigError) as caught:
        next(llm.stream(speaking.prompts[0], **{name: value}))
    assert caught.value.setting == name
    check_nothing_is_held(llm)


@pytest.mark.parametrize("call", ["abort", "completion", "fork"])
def test_what_is_no_sequence_is_refused(make_llama: MakeLLM, call: str) -> None:
    llm = make_llama()
    for value in (None, 5, "x"):
        with pytest.raises(ConfigError) as caught:
            getattr(llm, call)(value)
        assert caught.value.setting == "sequence"


@pytest.mark.parametrize("call", ["end_session", "session_tokens"])
def test_what_is_no_name_of_a_session_is_refused(make_llama: MakeLLM, call: str) -> None:
    llm = make_llama()
    for value in NO_TEXTS:
        with pytest.raises(ConfigError) as caught:
            getattr(llm, call)(value)
        assert caught.value.setting == "name"


def test_a_wrong_drain_is_refused_and_the_engine_stays_open(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama()
    for value in NO_SECONDS:
        with pytest.raises(ConfigError) as caught:
            llm.close(drain=value)  # type: ignore[arg-type]
        assert caught.value.setting == "drain"
    assert llm.generate([llama.prompts[0]], GREEDY)[0].token_ids == llama.truth[0]


# Without its packages


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("kvpager.engine", "torch"),
        ("kvpager.engine", "transformers"),
        ("kvpager.engine.sampler", "torch"),
        ("kvpager.kernels", "torch"),
    ],
)
def test_an_import_without_what_it_needs_says_what_to_install(module: str, absent: str) -> None:
    program = f"""
import sys
sys.modules[{absent!r}] = None
try:
    import {module}
except ImportError as error:
    print(error.name, type(error.__cause__).__name__, error, sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    name, cause, said = done.stdout.strip().split("|")
    assert (name, cause) == (absent, "ModuleNotFoundError")
    package = ".".join(module.split(".")[:2])
    assert said == f"{package} needs {absent}, which is not installed: {how_to_install('engine')}"
