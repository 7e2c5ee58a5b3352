"""`KVPagerHiCache` under SGLang's own factory, host pools and cache controller, beside a real sidecar."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpager import connect
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.sglang_process import SGLang, require_sglang

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("sglang")]

KEYS = ["one", "two", "three", "four"]
PAGES = [0, 1, 2, 3]
ELSEWHERE = [9, 7, 8, 5]
LINKS = Path(__file__).resolve().parents[1] / ".links"


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    require_sglang()
    with SGLang(tmp_path_factory.mktemp("sglang")) as process:
        yield process


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServeProcess]:
    require_sglang()
    with ServeProcess(tmp_path / "s", host_bytes=64 << 20) as serving:
        yield serving


def url_of(sidecar: ServeProcess) -> str:
    return f"unix://{sidecar.path}"


def make(sglang: SGLang, sidecar: ServeProcess, name: str, seed: int, **options: Any) -> None:
    """A rank whose pool holds random bytes."""
    assert sglang.ask("make", name, url=url_of(sidecar), **options) is None
    sglang.ask("fill", name, seed=seed)


def poison(sidecar: ServeProcess) -> None:
    """Every bit in its memory is another one."""
    numbers = np.memmap(sidecar.arena, dtype=np.uint8, mode="r+")
    np.invert(numbers, out=numbers)
    numbers.flush()


def test_the_methods_of_sglangs_base_class_are_there_as_it_declares_them(sglang: SGLang) -> None:
    assert sglang.ask("signatures") == []
    # Of models with several pools, which are refused.
    several = ["batch_exists_v2", "batch_get_v2", "batch_set_v2", "on_host_pools_registered"]
    assert sglang.ask("inherited") == several
    assert sglang.ask("engine_fields") == []


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mha", "layer_first"),
        ("mha", "page_first"),
        ("mha", "page_first_direct"),
        ("mha", "page_head"),
        ("mla", "layer_first"),
        ("mla", "page_first"),
        ("mla", "page_first_direct"),
    ],
)
@pytest.mark.parametrize("by_pointer", [True, False])
def test_what_is_read_is_what_was_stored_bit_by_bit_in_every_layout(
    sglang: SGLang, sidecar: ServeProcess, kind: str, layout: str, by_pointer: bool
) -> None:
    put, get = ("set", "get") if by_pointer else ("set_flat", "get_flat")
    make(sglang, sidecar, "rank", 1, kind=kind, layout=layout, dtype="bfloat16", by_pointer=by_pointer)
    stored = sglang.ask("digests", "rank", pages=PAGES)
    assert len(set(stored)) == 4
    assert sglang.ask(put, "rank", keys=KEYS, pages=PAGES) == ([True] * 4 if by_pointer else True)
    sglang.ask("fill", "rank", seed=2)
    blank = sglang.ask("digests", "rank", pages=ELSEWHERE)
    assert sglang.ask(get, "rank", keys=KEYS, pages=ELSEWHERE) == [True] * 4
    assert sglang.ask("digests", "rank", pages=ELSEWHERE) == stored
    # One at a time, and nothing beside the pages that were asked for.
    assert sglang.ask("digests", "rank", pages=PAGES) != stored
    sglang.ask("fill", "rank", seed=2)
    assert sglang.ask("digests", "rank", pages=ELSEWHERE) == blank
    assert sglang.ask(get, "rank", keys=KEYS[2:3], pages=ELSEWHERE[:1]) == [True]
    assert sglang.ask("digests", "rank", pages=ELSEWHERE) == [stored[2], *blank[1:]]
    sglang.ask("close", "rank")


def test_a_hit_is_the_longest_leading_run(sglang: SGLang, sidecar: ServeProcess) -> None:
    make(sglang, sidecar, "rank", 1)
    gap = ["one", "two", "not there", "three"]
    assert sglang.ask("exists", "rank", keys=KEYS) == [0, False, False, False, False]
    assert sglang.ask("get", "rank", keys=KEYS, pages=PAGES) == [False] * 4
    sglang.ask("set", "rank", keys=KEYS, pages=PAGES, before=[])
    assert sglang.ask("exists", "rank", keys=KEYS) == [4, True, True, True, True]
    assert sglang.ask("exists", "rank", keys=gap) == [2, True, True, False, True]
    assert sglang.ask("get", "rank", keys=gap, pages=ELSEWHERE) == [True, True, False, False]
    # What is there is not copied again.
    assert sglang.ask("set", "rank", keys=[*KEYS, "five"], pages=[*PAGES, 4], before=["zero"]) == [True] * 5
    counts = sglang.ask("counts", "rank")
    assert (counts["stored_pages"], counts["present_pages"], counts["refused_pages"]) == (5, 4, 0)
    assert (counts["loaded_pages"], counts["lost_pages"]) == (2, 6)
    stats = sglang.ask("stats", "rank")
    assert (stats["prefetch_pgs"], stats["backup_pgs"]) == ([2], [4, 1])
    assert all(rate > 0 for rate in stats["prefetch_bandwidth"] + stats["backup_bandwidth"])
    assert sglang.ask("stats", "rank")["prefetch_pgs"] == []
    sglang.ask("close", "rank")


def test_ranks_stages_models_types_page_sizes_and_layouts_find_nothing_of_each_other(
    sglang: SGLang, sidecar: ServeProcess, tmp_path: Path
) -> None:
    for name, content in (("a", b"weights"), ("b", b"others")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    variants: list[dict[str, Any]] = [
        {},
        {"rank": (0, 2)},
        {"rank": (1, 2)},
        {"stage": (0, 2)},
        {"stage": (1, 2)},
        {"kind": "mla"},
        {"model_name": "another"},
        {"dtype": "bfloat16"},
        {"page_size": 8},
        {"layout": "layer_first"},
        {"layout": "page_first_direct"},
        {"layout": "page_head"},
        {"by_pointer": False},
        {"by_pointer": False, "dtype": "bfloat16"},
        {"by_pointer": False, "layout": "layer_first"},
        {"extra": {"kvpager_model": str(tmp_path / "a")}},
        {"extra": {"kvpager_model": str(tmp_path / "b")}},
        {"extra": {"kvpager_tenant": "somebody"}},
    ]
    for at, options in enumerate(variants):
        make(sglang, sidecar, f"v{at}", at, **options)
        assert sglang.ask("exists", f"v{at}", keys=KEYS[:1]) == [0, False], options
        put = "set" if options.get("by_pointer", True) else "set_flat"
        sglang.ask(put, f"v{at}", keys=KEYS[:1], pages=[0])
    stored = [sglang.ask("digests", f"v{at}", pages=[0])[0] for at in range(len(variants))]
    for at, options in enumerate(variants):
        sglang.ask("fill", f"v{at}", seed=100)
        get = "get" if options.get("by_pointer", True) else "get_flat"
        assert sglang.ask(get, f"v{at}", keys=KEYS[:1], pages=[3]) == [True], options
        assert sglang.ask("digests", f"v{at}", pages=[3]) == [stored[at]], options
        sglang.ask("close", f"v{at}")


def test_a_page_has_another_name_where_any_of_sglangs_arguments_that_alter_kv_is_another_one(
    sglang: SGLang, tmp_path: Path
) -> None:
    def weights(name: str, content: bytes) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").write_bytes(content)
        return str(tmp_path / name)

    scales = tmp_path / "scales.json"
    scales.write_text("1")
    a, b = weights("a", b"a"), weights("b", b"b")
    base = {"model_path": a}
    names = [sglang.ask("page_name", arguments=base)]
    assert names[0] is not None
    # What is read does not name pages by where it lies.
    assert sglang.ask("page_name", arguments={"model_path": weights("elsewhere", b"a")}) == names[0]
    assert sglang.ask("page_name", arguments={**base, "port": 7, "served_model_name": "x"}) == names[0]
    for changed in (
        {"model_path": b},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"quantization_param_path": str(scales)},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"context_length": 77},
        {"load_format": "safetensors"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "random_seed": 5},
        {"speculative_algorithm": "EAGLE"},
        {"speculative_draft_model_path": a},
        {"speculative_draft_model_path": b},
        {"trust_remote_code": True},
        {"model_impl": "transformers"},
        {"model_loader_extra_config": '{"a": 1}'},
        {"custom_weight_loader": ["a.loader"]},
        {"modelopt_quant": "fp8"},
        {"rl_quant_profile": "a"},
        {"forward_hooks": [{"name": "a"}]},
        {"lora_paths": [f"one={a}"]},
        {"lora_paths": [f"two={a}"]},
        {"lora_paths": {"one": b}},
        {"lora_paths": [{"lora_name": "both", "lora_path": b}, f"one={a}"]},
    ):
        names.append(sglang.ask("page_name", arguments={**base, **changed}))
        assert names[-1] not in [None, *names[:-1]], changed
    scales.write_text("2")
    names.append(sglang.ask("page_name", arguments={**base, "quantization_param_path": str(scales)}))
    for file in ("config.json", "hf_quant_config.json", "modeling_own.py"):
        (tmp_path / "a" / file).write_text("{}")
        names.append(sglang.ask("page_name", arguments=base))
    assert len(set(names)) == len(names)
    assert sglang.ask("page_name", arguments={"model_path": str(tmp_path / "nowhere")}) is None


def test_the_model_may_be_one_of_a_hugging_face_cache_by_its_name_and_revision(sglang: SGLang) -> None:
    folder = sglang.folder / "hub" / "models--some--model"
    for revision in ("a" * 40, "b" * 40):
        weights = folder / "snapshots" / revision / "model.safetensors"
        weights.parent.mkdir(parents=True)
        weights.write_text(revision)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    arguments = {"model_path": "some/model"}
    main = sglang.ask("page_name", arguments=arguments)
    assert main is not None
    assert sglang.ask("page_name", arguments=arguments, model="some/model") == main
    assert sglang.ask("page_name", arguments={**arguments, "revision": "a" * 40}) == main
    assert sglang.ask("page_name", arguments={**arguments, "revision": "b" * 40}) not in (None, main)
    assert sglang.ask("page_name", arguments=arguments, model="some/other") is None


def test_ranks_of_a_latent_cache_share_their_pages(sglang: SGLang, sidecar: ServeProcess) -> None:
    make(sglang, sidecar, "writer", 1, kind="mla", rank=(0, 2))
    make(sglang, sidecar, "reader", 2, kind="mla", rank=(1, 2))
    sglang.ask("set", "writer", keys=KEYS, pages=PAGES)
    assert sglang.ask("get", "reader", keys=KEYS, pages=ELSEWHERE) == [True] * 4
    stored = sglang.ask("digests", "writer", pages=PAGES)
    assert sglang.ask("digests", "reader", pages=ELSEWHERE) == stored
    for name in ("writer", "reader"):
        sglang.ask("close", name)


def test_pages_outlive_the_process_and_bytes_that_are_altered_alter_what_is_got(
    sglang: SGLang, sidecar: ServeProcess, tmp_path: Path
) -> None:
    make(sglang, sidecar, "rank", 1)
    stored = sglang.ask("digests", "rank", pages=PAGES)
    sglang.ask("set", "rank", keys=KEYS, pages=PAGES)
    sglang.ask("close", "rank")
    with SGLang(tmp_path) as later:
        make(later, sidecar, "rank", 2)
        assert later.ask("get", "rank", keys=KEYS, pages=PAGES) == [True] * 4
        assert later.ask("digests", "rank", pages=PAGES) == stored
        poison(sidecar)
        assert later.ask("get", "rank", keys=KEYS, pages=PAGES) == [True] * 4
        poisoned = later.ask("digests", "rank", pages=PAGES)
        assert not set(poisoned) & set(stored)


def test_sglangs_controller_writes_a_prompt_and_finds_as_much_of_it_as_is_there(
    sglang: SGLang, sidecar: ServeProcess
) -> None:
    if (reason := sglang.ask("hashes")) is not None:
        pytest.skip(f"SGLang cannot name pages here: {reason}")
    url, prompt = url_of(sidecar), list(range(28))
    found, written = sglang.ask("controlled", url=url, write=True, tokens=prompt[:20])
    assert found == len(set(written)) == 5
    assert sglang.ask("controlled", url=url, write=False, tokens=prompt) == [5, written]
    assert sglang.ask("controlled", url=url, write=False, tokens=prompt[1:]) == [0, []]


def test_a_sidecar_that_is_absent_stalls_or_dies_costs_hits_and_is_said_once(
    sglang: SGLang, tmp_path: Path
) -> None:
    sidecar = ServeProcess(tmp_path / "s", host_bytes=64 << 20)
    said = f"serving on without {url_of(sidecar)}"
    extra = {"kvpager_lookup_seconds": 0.3}
    make(sglang, sidecar, "rank", 1, extra=extra)
    for _ in range(3):
        assert sglang.ask("timed", "rank", keys=KEYS, pages=PAGES) < 1.0
    assert sglang.ask("set", "rank", keys=KEYS, pages=PAGES) == [False] * 4
    assert sglang.log.count(said) == 1
    with sidecar:
        stored = sglang.ask("digests", "rank", pages=PAGES)
        until = time.monotonic() + 20
        while not all(sglang.ask("set", "rank", keys=KEYS, pages=PAGES)):
            assert time.monotonic() < until
            time.sleep(0.05)
        sidecar.pause()
        waits = [sglang.ask("timed", "rank", keys=KEYS, pages=PAGES) for _ in range(3)]
        # It is waited for once, and asked nothing for some seconds then.
        assert waits[0] < 3
        assert max(waits[1:]) < 0.3
        assert sglang.log.count(said) == 2
        sidecar.resume()
        sidecar.kill()
        assert sglang.ask("get", "rank", keys=KEYS, pages=ELSEWHERE) == [False] * 4
        sidecar.start()
        sglang.ask("fill", "rank", seed=2)
        until = time.monotonic() + 20
        while not all(sglang.ask("get", "rank", keys=KEYS, pages=ELSEWHERE)):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert sglang.ask("digests", "rank", pages=ELSEWHERE) == stored
        assert sglang.log.count(said) == 2
        assert f"{url_of(sidecar)} is there again" in sglang.log
    sglang.ask("close", "rank")


def test_a_call_waits_no_longer_than_it_was_told_and_for_no_clear(sglang: SGLang, tmp_path: Path) -> None:
    seconds = 1.0
    with ServeProcess(tmp_path / "s", host_bytes=64 << 20) as sidecar:
        make(sglang, sidecar, "rank", 1, extra={"kvpager_lookup_seconds": seconds})
        assert sglang.ask("set", "rank", keys=KEYS[:2], pages=PAGES[:2]) == [True] * 2
        sidecar.kill()
        assert sglang.ask("clear", "rank") == "ServiceUnavailableError"
        sidecar.start()
        until = time.monotonic() + 20
        with connect(url_of(sidecar)) as connection:
            while not any(one["name"].startswith("sglang") for one in connection.clients().values()):
                assert time.monotonic() < until
                time.sleep(0.05)
        # It is made up for while the sidecar does not answer.
        sidecar.pause()
        began = time.monotonic()
        for _ in range(3):
            assert sglang.ask("exists", "rank", keys=KEYS)[0] == 0
            assert sglang.ask("set", "rank", keys=KEYS, pages=PAGES) == [False] * 4
        assert time.monotonic() - began < seconds
        sidecar.resume()
        while not all(sglang.ask("set", "rank", keys=KEYS[:1], pages=PAGES[:1])):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert sglang.ask("exists", "rank", keys=KEYS)[0] == 1
        # As long as it takes to see that it does not answer, once for what one call asks of it.
        sidecar.pause()
        began = time.monotonic()
        assert sglang.ask("get", "rank", keys=KEYS, pages=PAGES) == [False] * 4
        assert seconds / 2 < time.monotonic() - began < seconds * 1.6
        sidecar.resume()
    sglang.ask("close", "rank")


def test_pages_come_up_from_the_cold_tier_and_a_record_that_is_altered_is_a_miss(
    sglang: SGLang, tmp_path: Path
) -> None:
    cold = tmp_path / "cold"
    options = (f"--cold=disk://{cold}", "--cold-bytes=64M")
    with ServeProcess(tmp_path / "s", *options, host_bytes=64 << 20) as sidecar:
        make(sglang, sidecar, "rank", 1)
        stored = sglang.ask("digests", "rank", pages=PAGES)
        sglang.ask("set", "rank", keys=KEYS, pages=PAGES)
        with connect(url_of(sidecar)) as connection:
            assert connection.flush() == 0
        sidecar.terminate()
        sidecar.arena.unlink(missing_ok=True)
        sidecar.start()
        until = time.monotonic() + 20
        sglang.ask("fill", "rank", seed=2)
        while sglang.ask("exists", "rank", keys=KEYS)[0] != 4:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert sglang.ask("get", "rank", keys=KEYS[:2], pages=PAGES[:2]) == [True] * 2
        assert sglang.ask("digests", "rank", pages=PAGES[:2]) == stored[:2]
        # Nothing stays leased by a call that failed half way.
        assert sglang.ask("get_while_loads_fail", "rank", keys=KEYS, pages=ELSEWHERE) == [False] * 4
        with connect(url_of(sidecar)) as connection:
            while connection.stats()["sidecar"]["leased"]:
                assert time.monotonic() < until
                time.sleep(0.05)
        alter_records(cold)
        assert sglang.ask("get", "rank", keys=KEYS, pages=ELSEWHERE) == [True, True, False, False]
    sglang.ask("close", "rank")


def alter_records(folder: Path) -> None:
    """The last byte of each record in a folder is another one."""
    records = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1024]
    assert len(records) >= len(KEYS)
    for path in records:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_clear_removes_the_pages_of_every_rank_and_nothing_of_others(
    sglang: SGLang, sidecar: ServeProcess
) -> None:
    for name, options in (("first", {"rank": (0, 2)}), ("second", {"rank": (1, 2)})):
        make(sglang, sidecar, name, 1, **options)
        sglang.ask("set", name, keys=KEYS, pages=PAGES)
    make(sglang, sidecar, "other", 1, extra={"kvpager_tenant": "somebody"})
    sglang.ask("set", "other", keys=KEYS, pages=PAGES)
    assert sglang.ask("clear", "first") is None
    for name, found in (("first", 0), ("second", 0), ("other", 4)):
        assert sglang.ask("exists", name, keys=KEYS)[0] == found
    assert sglang.ask("set", "second", keys=KEYS, pages=PAGES) == [True] * 4
    # One that could not be made is made up for before anything is found.
    sidecar.kill()
    assert sglang.ask("clear", "second") == "ServiceUnavailableError"
    assert sglang.ask("exists", "second", keys=KEYS)[0] == 0
    sidecar.start()
    until = time.monotonic() + 20
    while not all(sglang.ask("set", "second", keys=KEYS[:1], pages=PAGES[:1])):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert sglang.ask("exists", "second", keys=KEYS) == [1, True, False, False, False]
    for name in ("first", "second", "other"):
        sglang.ask("close", name)


def test_what_cannot_be_kept_is_refused_with_the_reason(sglang: SGLang, sidecar: ServeProcess) -> None:
    url = url_of(sidecar)
    refused = sglang.ask("make", "rank", url="kvpager://localhost:1")
    assert refused == (
        "ConfigError: kvpager_url: must be unix:///path, a sidecar of this machine, got 'kvpager://localhost:1'"
    )
    secret = sglang.ask("make", "rank", url="kvpager://me:hidden@localhost:1?password=hidden")
    assert secret.startswith("ConfigError: kvpager_url")
    assert "hidden" not in secret
    assert "kvpager_tennant" in sglang.ask("make", "rank", url=url, extra={"kvpager_tennant": "a"})
    for name in (None, "a-model"):
        unknown = sglang.ask("make", "rank", url=url, model_name=name, extra={"kvpager_model": ""})
        assert "SGLang does not say which model" in unknown
    make(sglang, sidecar, "rank", 1)
    assert sglang.ask("register_second_pool", "rank", pool_name="kv") is None
    assert "keeps KV alone" in sglang.ask("register_second_pool", "rank", pool_name="mamba")
    sglang.ask("close", "rank")


@pytest.mark.parametrize("release", ["0.5.19", "0.6.0", "0.5.24.post1"])
def test_a_release_of_sglang_that_is_not_supported_is_told_in_one_sentence(
    tmp_path: Path, release: str
) -> None:
    info = tmp_path / f"sglang-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    ended = subprocess.run(
        [require_sglang(), "-c", "import kvpager.api.integrations.sglang"],
        env={"PYTHONPATH": f"{tmp_path}:{LINKS}", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert f"ConfigError: sglang: {release} is not supported" in ended.stderr
    assert "0.5.20, 0.5.21, 0.5.22, 0.5.23" in ended.stderr
