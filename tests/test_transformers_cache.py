"""The KV of transformers' prompts, kept: what is generated is what is without, and less is computed."""

from __future__ import annotations

import copy
import json
import logging
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvpager import HostStore
from kvpager.api.integrations.transformers import KVPager, keeper
from kvpager.api.integrations.transformers.copying import Filling
from kvpager.api.integrations.transformers.supported import is_supported
from kvpager.tests.model_files import TINY_KINDS, require_smollm2, save_tiny_model
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.transformers_cases import (
    BLOCK,
    WORDS,
    Computed,
    cache_argument,
    generate,
    prompt_of,
    tiny_llama,
)
from kvpager.tiers.errors import ClosedError, ColdTierError, ConfigError, LayoutError

PROMPT = prompt_of(1, 200)
FOUND = 192
"""Of its tokens: its full blocks, without the last token."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def store() -> Iterator[HostStore]:
    host = HostStore(16 << 20)
    yield host
    host.check_integrity()
    host.close()


@pytest.fixture
def pager(model: Any, store: HostStore) -> Iterator[KVPager]:
    with KVPager(model, store=store) as made:
        yield made


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServeProcess]:
    with ServeProcess(tmp_path / "s", host_bytes=16 << 20) as serving:
        yield serving


def url_of(sidecar: ServeProcess) -> str:
    return f"unix://{sidecar.path}"


def found(pager: KVPager, prompt: torch.Tensor) -> int:
    """Tokens of a prompt that are found after what is being kept is kept."""
    pager.flush()
    return pager.cache(prompt).loaded


def in_its_thread(ours: keeper.Keeper, call: Callable[[], object]) -> None:
    reached: Future[None] = Future()
    reached.add_done_callback(lambda done: call())
    ours._jobs.put(keeper._Reached(reached, told=False))


@contextmanager
def held_up(pager: KVPager) -> Iterator[None]:
    """Nothing is kept for as long as this lasts: it is as with a slow disk."""
    go = threading.Event()
    in_its_thread(pager._keeper, lambda: go.wait(60.0))
    try:
        yield
    finally:
        go.set()


def in_a_process(model: Path, prompt: torch.Tensor, **pager: Any) -> dict[str, Any]:
    script = Path(__file__).with_name("transformers_process.py")
    values = {"model": str(model), "prompt": prompt[0].tolist(), "pager": pager}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(values)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_prompt_that_was_computed_once_is_not_computed_again(model: Any, pager: KVPager) -> None:
    expected = generate(model, PROMPT)
    first = pager.cache(PROMPT)
    assert first.loaded == 0
    assert generate(model, PROMPT, first).equal(expected)
    pager.flush()
    second = pager.cache(PROMPT)
    with Computed(model) as computed:
        assert generate(model, PROMPT, second).equal(expected)
    assert (second.loaded, computed.tokens) == (FOUND, 200 - FOUND + 19)
    stats = pager.stats
    assert (stats.prompts, stats.hit_prompts, stats.hit_tokens) == (2, 1, FOUND)
    assert stats.stored_blocks == 219 // BLOCK
    assert stats.refused_blocks == 0


def test_a_later_process_finds_in_the_folder_what_an_earlier_one_computed(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    expected = generate(model, PROMPT).tolist()
    for loaded in (0, FOUND):
        answer = in_a_process(tmp_path / "model", PROMPT, folder=str(tmp_path / "kept"))
        assert answer == {"tokens": expected, "loaded": loaded, "computed": 219 - loaded}


def test_what_lies_in_the_sidecar_is_what_is_read(model: Any, sidecar: ServeProcess) -> None:
    expected = generate(model, PROMPT)
    with KVPager(model, url=url_of(sidecar)) as pager:
        assert generate(model, PROMPT, pager.cache(PROMPT)).equal(expected)
    with KVPager(model, url=url_of(sidecar)) as pager:
        cache = pager.cache(PROMPT)
        assert cache.loaded == FOUND
        assert generate(model, PROMPT, cache).equal(expected)
        pager.flush()
        numbers = np.memmap(sidecar.arena, dtype=np.float32, mode="r+")
        np.negative(numbers, out=numbers)
        numbers.flush()
        poisoned = pager.cache(PROMPT)
        assert poisoned.loaded == FOUND
        assert not generate(model, PROMPT, poisoned).equal(expected)


def test_prompts_that_part_anywhere_about_a_block_share_what_is_before(model: Any, pager: KVPager) -> None:
    shared = prompt_of(2, 3 * BLOCK)
    generate(model, shared, pager.cache(shared), count=2)
    for length in (*range(BLOCK - 2, BLOCK + 3), *range(2 * BLOCK - 2, 2 * BLOCK + 3)):
        for at, more in enumerate((0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1)):
            tail = prompt_of(length, more)
            # None goes on as another does.
            tail[:, :1] = (shared[:, length] + 1 + at) % WORDS
            prompt = torch.cat([shared[:, :length], tail], dim=1)
            pager.flush()
            cache = pager.cache(prompt)
            assert cache.loaded == min(length, prompt.shape[1] - 1) // BLOCK * BLOCK
            assert generate(model, prompt, cache, count=2).equal(generate(model, prompt, count=2))


def test_what_was_generated_is_found_by_the_next_turn(model: Any, pager: KVPager) -> None:
    answer = generate(model, PROMPT, pager.cache(PROMPT), count=60)
    pager.flush()
    turn = torch.cat([PROMPT, answer, prompt_of(3, 10)], dim=1)
    cache = pager.cache(turn)
    assert cache.loaded == 259 // BLOCK * BLOCK
    assert generate(model, turn, cache).equal(generate(model, turn))


def test_one_cache_goes_on_from_turn_to_turn(model: Any, pager: KVPager) -> None:
    cache, turn = pager.cache(PROMPT), PROMPT
    for seed in (4, 5):
        answer = generate(model, turn, cache)
        assert answer.equal(generate(model, turn))
        turn = torch.cat([turn, answer, prompt_of(seed, 30)], dim=1)
    assert found(pager, turn) == 269 // BLOCK * BLOCK


def test_several_prompts_at_once_have_what_all_of_them_find(model: Any, pager: KVPager) -> None:
    prompts = prompt_of(6, 100, rows=3)
    expected = generate(model, prompts)
    assert generate(model, prompts, pager.cache(prompts)).equal(expected)
    pager.flush()
    cache = pager.cache(prompts)
    assert cache.loaded == 96
    assert generate(model, prompts, cache).equal(expected)
    others = torch.cat([prompts[:1], torch.cat([prompts[1:2, :50], prompt_of(7, 50)], dim=1)])
    cache = pager.cache(others)
    assert cache.loaded == 48
    assert generate(model, others, cache).equal(generate(model, others))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3, "eos_token_id": 0},
        {"prefill_chunk_size": 37},
    ],
    ids=["beams", "several-answers", "assisted", "in-chunks"],
)
def test_other_ways_of_generating_are_as_without(model: Any, pager: KVPager, options: dict[str, Any]) -> None:
    # It repeats itself, so that candidates are found in it.
    prompt = torch.cat([PROMPT, PROMPT[:, :60]], dim=1)
    expected = generate(model, prompt, count=40, **options)
    assert generate(model, prompt, pager.cache(prompt), count=40, **options).equal(expected)
    pager.flush()
    cache = pager.cache(prompt)
    assert cache.loaded == 256
    with Computed(model) as computed:
        assert generate(model, prompt, cache, count=40, **options).equal(expected)
    assert computed.tokens < 260
    for answer in expected:
        turn = torch.cat([prompt, answer[None], prompt_of(8, 3)], dim=1)
        assert found(pager, turn) >= 288
        assert generate(model, turn, pager.cache(turn)).equal(generate(model, turn))


def test_a_cache_that_is_cropped_copied_or_repeated_is_named_by_what_it_has(
    model: Any, pager: KVPager
) -> None:
    generate(model, PROMPT, pager.cache(PROMPT))
    pager.flush()
    whole = pager.cache(PROMPT)
    other = copy.deepcopy(whole)
    ahead = torch.cat([PROMPT[:, :FOUND], prompt_of(9, 40)], dim=1)
    several = copy.deepcopy(whole)
    several.batch_repeat_interleave(2)
    two = torch.cat([PROMPT, PROMPT])
    assert generate(model, two, several).equal(generate(model, two))
    assert generate(model, PROMPT, whole).equal(generate(model, PROMPT))
    # Back to the prompt's first 150 tokens, and on with others.
    other.crop(150 - FOUND)
    branch = torch.cat([PROMPT[:, :150], prompt_of(10, 50)], dim=1)
    assert generate(model, branch, other).equal(generate(model, branch))
    assert found(pager, branch) == FOUND
    assert found(pager, ahead) == FOUND
    assert generate(model, branch, pager.cache(branch)).equal(generate(model, branch))


def test_what_was_computed_before_an_interrupt_is_kept(model: Any, pager: KVPager) -> None:
    class Interrupt:
        calls = 0

        def __call__(self, tokens: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
            self.calls += 1
            if self.calls == 50:
                raise KeyboardInterrupt
            return torch.zeros(len(tokens), dtype=torch.bool)

    answer = generate(model, PROMPT, count=60)
    with pytest.raises(KeyboardInterrupt):
        generate(model, PROMPT, pager.cache(PROMPT), count=60, stopping_criteria=[Interrupt()])
    turn = torch.cat([PROMPT, answer], dim=1)
    assert found(pager, turn) == 249 // BLOCK * BLOCK
    assert generate(model, turn, pager.cache(turn)).equal(generate(model, turn))


def test_other_weights_types_salts_and_settings_find_nothing_of_each_other(store: HostStore) -> None:
    def one(salt: str = "", seed: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> KVPager:
        return KVPager(tiny_llama(seed, **options).to(dtype), store=store, salt=salt)

    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
    pagers = [
        one(),
        one("a"),
        one("b"),
        one(seed=2),
        one(dtype=torch.bfloat16),
        one(**rope),
        one(rms_norm_eps=1e-3),
    ]
    for pager in pagers:
        assert found(pager, PROMPT) == 0
        generate(pager._model, PROMPT, pager.cache(PROMPT))
    for pager in pagers:
        assert found(pager, PROMPT) == FOUND
        pager.close()
    with one() as again:
        assert found(again, PROMPT) == FOUND


def test_weights_that_change_find_nothing_of_before_and_are_not_taken_for_them(store: HostStore) -> None:
    model = tiny_llama(3)
    with KVPager(model, store=store) as pager:
        generate(model, PROMPT, pager.cache(PROMPT))
        assert found(pager, PROMPT) == FOUND
        late = pager.cache(prompt_of(11, 100))
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(2)
        generate(model, prompt_of(11, 100), late)
        assert found(pager, PROMPT) == 0
        assert found(pager, prompt_of(11, 100)) == 0
        model.model.layers[0].self_attn.k_proj.weight.data.div_(2)
        pager.weights_changed()
        assert found(pager, PROMPT) == FOUND
        # What the changed weights computed is not among it.
        assert found(pager, prompt_of(11, 100)) == 0


# Of peft, which is behind transformers.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_find_their_own_and_the_model_without_them_its_own(store: HostStore) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(5)
    with KVPager(tiny_llama(), store=store) as plain:
        generate(plain._model, PROMPT, plain.cache(PROMPT))
        plain.flush()
    model = peft.get_peft_model(tiny_llama(), config, adapter_name="first").eval()
    model.add_adapter("second", config)
    with KVPager(model, store=store) as pager:
        answers = []
        for name in ("first", "second"):
            model.set_adapter(name)
            expected = generate(model, PROMPT)
            assert found(pager, PROMPT) == 0
            assert generate(model, PROMPT, pager.cache(PROMPT)).equal(expected)
            cache = pager.cache(PROMPT) if found(pager, PROMPT) == FOUND else None
            assert cache is not None
            assert generate(model, PROMPT, cache).equal(expected)
            answers.append(expected)
        assert not answers[0].equal(answers[1])
        model.set_adapter("first")
        assert found(pager, PROMPT) == FOUND
        with model.disable_adapter():
            assert found(pager, PROMPT) == FOUND  # of the model that never had any
            without = generate(model, PROMPT)
            assert generate(model, PROMPT, pager.cache(PROMPT)).equal(without)
        assert not without.equal(answers[0])
        prompts = prompt_of(12, 60, rows=2)
        named: dict[str, Any] = {"adapter_names": ["first", "second"]}
        expected = generate(model, prompts, **named)
        assert generate(model, prompts, pager.cache(prompts), **named).equal(expected)
        assert found(pager, prompts) == 0


# Of peft, which is behind transformers.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_weights_that_are_written_to_without_torch_knowing_find_nothing_of_before(store: HostStore) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_llama()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    with KVPager(model, store=store) as pager:
        generate(model, PROMPT, pager.cache(PROMPT))
        assert found(pager, PROMPT) == FOUND
        late, loaded = pager.cache(prompt_of(11, 100)), pager.cache(PROMPT)
        weight = model.model.layers[0].self_attn.k_proj.weight
        before = weight.data_ptr(), weight._version
        assert peft.get_peft_model(model, config).merge_and_unload() is model
        assert (weight.data_ptr(), weight._version) == before
        assert model.model.layers[0].self_attn.k_proj.weight is weight
        generate(model, prompt_of(11, 100), late)
        with pytest.raises(ConfigError, match="model as it was"):
            generate(model, PROMPT, loaded)
        assert found(pager, PROMPT) == 0
        assert found(pager, prompt_of(11, 100)) == 0


def test_a_parameter_that_takes_the_place_of_another_is_another(store: HostStore) -> None:
    model = tiny_llama()
    layer = model.model.layers[0].self_attn.k_proj
    with KVPager(model, store=store) as pager:
        layer.weight = torch.nn.Parameter(layer.weight.data)
        before = pager._identity.state()
        assert pager._identity.state() == before
        layer.weight = torch.nn.Parameter(layer.weight.data)
        assert pager._identity.passing() == before.passing  # address and count of writes are the same
        assert pager._identity.state() != before


# Of peft, which is behind transformers.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_what_another_adapter_computed_into_a_cache_is_not_kept_under_its_name(store: HostStore) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(6)
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(), config, adapter_name="first").eval()
    model.add_adapter("second", config)
    model.set_adapter("first")
    with KVPager(model, store=store) as pager:
        cache = pager.cache(PROMPT)
        with torch.no_grad():
            for begin, end in ((0, 100), (100, 120), (120, 200)):
                if begin == 100:
                    with model.disable_adapter():
                        model(PROMPT[:, begin:end], **{cache_argument(): cache})
                else:
                    model(PROMPT[:, begin:end], **{cache_argument(): cache})
        cache.save()
        assert found(pager, PROMPT) == 96
        loaded = pager.cache(PROMPT)
        model.set_adapter("second")
        with pytest.raises(ConfigError, match="adapters"):
            generate(model, PROMPT, loaded)


def test_what_was_computed_under_autocast_is_not_kept_under_the_name_without(
    model: Any, pager: KVPager
) -> None:
    cache = pager.cache(PROMPT)
    with torch.no_grad():
        model(PROMPT[:, :50], **{cache_argument(): cache})
        with torch.autocast("cpu", torch.bfloat16):
            model(PROMPT[:, 50:51], **{cache_argument(): cache})
        model(PROMPT[:, 51:], **{cache_argument(): cache})
    cache.save()
    assert found(pager, PROMPT) == 48
    loaded = pager.cache(PROMPT)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
        generate(model, PROMPT, loaded)


def test_without_a_sidecar_everything_is_computed_and_it_is_said_once(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(model, PROMPT)
    with (
        KVPager(model, url=f"unix://{tmp_path / 'nobody'}") as pager,
        caplog.at_level(logging.INFO, "kvpager"),
    ):
        for _ in range(3):
            cache = pager.cache(PROMPT)
            assert generate(model, PROMPT, cache).equal(expected)
            assert cache.loaded == 0
        pager.flush()
        assert pager.stats.refused_blocks >= 3 * 12
    assert sum("serving on without" in one.message for one in caplog.records) == 1


def test_a_sidecar_that_is_killed_and_comes_back_is_done_without_meanwhile(
    model: Any, sidecar: ServeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(model, PROMPT)
    with KVPager(model, url=url_of(sidecar)) as pager:
        generate(model, PROMPT, pager.cache(PROMPT))
        assert found(pager, PROMPT) == FOUND
        loaded = pager.cache(PROMPT)
        sidecar.kill()
        assert generate(model, PROMPT, loaded).equal(expected)
        assert pager.cache(PROMPT).loaded == 0
        assert generate(model, PROMPT, pager.cache(PROMPT)).equal(expected)
        assert sum("serving on without" in one.message for one in caplog.records) == 1
        sidecar.start()
        pager._keeper._home._link.wait(10.0)  # type: ignore[attr-defined]
        assert found(pager, PROMPT) == FOUND
        assert generate(model, PROMPT, pager.cache(PROMPT)).equal(expected)


def test_a_prompt_larger_than_host_memory_is_kept_on_disk_and_found(model: Any, tmp_path: Path) -> None:
    prompt = prompt_of(13, 3000)
    with KVPager(model, folder=tmp_path / "kept", host_bytes=2 << 20) as pager:
        assert pager._shape.layout.token_bytes * 3000 > 4 << 20
        pager._keeper._batch = lambda rows: 16  # type: ignore[method-assign]
        generate(model, prompt, pager.cache(prompt), count=3)
        cache = pager.cache(prompt) if found(pager, prompt) == 2992 else None
        assert cache is not None
        assert generate(model, prompt, cache, count=3).equal(generate(model, prompt, count=3))
        with pytest.raises(ConfigError, match="in use"):
            KVPager(model, folder=tmp_path / "kept")


@pytest.mark.parametrize(
    "kind", ["llama-llama3-rope", "llama-tied-biased", "mistral-no-window", "qwen2-yarn", "qwen3"]
)
def test_families_of_models_are_as_without(kind: str, store: HostStore, tmp_path: Path) -> None:
    model = save_tiny_model(kind, tmp_path)
    prompt = prompt_of(14, 150) % 199
    expected = generate(model, prompt, eos_token_id=1)
    with KVPager(model, store=store) as pager:
        for loaded in (0, 144):
            pager.flush()
            cache = pager.cache(prompt)
            assert cache.loaded == loaded
            assert generate(model, prompt, cache, eos_token_id=1).equal(expected)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("mistral", "DynamicSlidingWindowLayer"), ("qwen2", "full attention"), ("llama-dynamic-rope", "RoPE")],
)
def test_models_whose_kv_no_prefix_names_are_refused_with_the_reason(
    kind: str, why: str, store: HostStore, tmp_path: Path
) -> None:
    assert kind in TINY_KINDS
    with pytest.raises(LayoutError, match=why):
        KVPager(save_tiny_model(kind, tmp_path), store=store)


def test_an_encoder_decoder_is_refused(store: HostStore) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    with pytest.raises(LayoutError, match="encoder-decoder"):
        KVPager(T5ForConditionalGeneration(T5Config(**sizes)), store=store)


def test_what_cannot_be_kept_of_a_call_is_refused_or_left_out(model: Any, pager: KVPager) -> None:
    mask = torch.ones_like(PROMPT)
    mask[0, :20] = 0
    with pytest.raises(ConfigError, match="padded"):
        pager.cache(PROMPT, attention_mask=mask)
    with pytest.raises(ConfigError, match="token ids"):
        pager.cache(PROMPT, inputs_embeds=torch.zeros(1, 200, 64))
    with pytest.raises(ConfigError, match="input_ids"):
        pager.cache([[1, 2], [3]])
    # Padding of which only generate is told.
    argument = {cache_argument(): pager.cache(PROMPT)}
    model.generate(
        PROMPT, attention_mask=mask, do_sample=False, max_new_tokens=20, pad_token_id=0, **argument
    )
    assert found(pager, PROMPT) == 0
    generate(model, PROMPT, pager.cache(PROMPT))
    pager.flush()
    with pytest.raises(ConfigError, match="prompt that this cache was made for"):
        generate(model, prompt_of(15, 200), pager.cache(PROMPT))


def test_more_than_may_be_pending_is_refused_and_can_be_saved_later(
    model: Any, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_PENDING_BYTES", 1)
    prompts = [prompt_of(seed, 100) for seed in range(20, 24)]
    with KVPager(model, store=store, load_seconds=0.01) as pager:
        with held_up(pager):
            for prompt in prompts[:3]:
                generate(model, prompt, pager.cache(prompt))
            last = pager.cache(prompts[3])
            generate(model, prompts[3], last)
            # What the first one had at first, and its rest.
            assert len(pager._keeper._pending) == 2
        pager._keeper.flush()
        assert pager.stats.refused_blocks == 2 * (119 // BLOCK)
        assert [pager.cache(prompt).loaded for prompt in prompts] == [96, 0, 0, 0]
        assert last.save() == 112
        assert found(pager, prompts[3]) == 96


def test_caches_that_are_dropped_sooner_than_they_are_kept_are_waited_for(
    model: Any, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_PENDING_BYTES", 1)
    prompts = [prompt_of(seed, 60) for seed in range(30, 36)]
    with KVPager(model, store=store) as pager:
        for prompt in prompts:
            generate(model, prompt, pager.cache(prompt), count=6)
        assert [found(pager, prompt) for prompt in prompts] == [48] * 6
        assert pager.stats.refused_blocks == 0


def test_the_garbage_collector_may_end_a_cache_anywhere_and_a_pager_in_its_own_thread(
    model: Any, store: HostStore
) -> None:
    pager = KVPager(model, store=store)
    ours = pager._keeper
    with held_up(pager):
        caches = [pager.cache(PROMPT)]
        generate(model, PROMPT, caches[0])
        with ours._lock:  # as where it happens while something is counted
            caches.clear()
    pagers = [pager]
    del pager
    in_its_thread(ours, pagers.clear)
    ours._ended.result(10.0)
    assert not model.model._forward_hooks
    with KVPager(model, store=store) as later:
        assert later.cache(PROMPT).loaded == FOUND


def test_keys_and_values_that_are_kept_are_not_held_on_to(model: Any, pager: KVPager) -> None:
    cache = pager.cache(PROMPT)
    generate(model, PROMPT, cache, count=9)  # its last block is full
    held = weakref.ref(cache.layers[0].keys)
    del cache
    until = time.monotonic() + 10.0
    while (pager._keeper.busy or held() is not None) and time.monotonic() < until:
        time.sleep(0.01)
    assert held() is None


def test_a_model_that_is_refused_leaves_nothing_open(model: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "get_decoder", lambda self: object())
        with pytest.raises(LayoutError, match="no decoder"):
            KVPager(model, folder=tmp_path / "kept")
    KVPager(model, folder=tmp_path / "kept").close()


def test_blocks_whose_leases_were_lost_while_they_were_read_are_not_used(
    model: Any, sidecar: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVPager(model, url=url_of(sidecar)) as pager:
        expected = generate(model, PROMPT, pager.cache(PROMPT))
        assert found(pager, PROMPT) == FOUND
        link = pager._keeper._home._link  # type: ignore[attr-defined]
        send = Filling.send

        def late(self: Filling, begin: int, count: int) -> None:
            send(self, begin, count)
            lost = link.lost
            sidecar.kill()
            sidecar.start("--fresh")
            until = time.monotonic() + 10.0
            while link.lost is lost and time.monotonic() < until:
                time.sleep(0.01)
            assert link.lost is not lost

        monkeypatch.setattr(Filling, "send", late)
        cache = pager.cache(PROMPT)
        assert cache.loaded == 0
        assert generate(model, PROMPT, cache).equal(expected)


def test_leases_end_where_bringing_blocks_up_fails(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(13, 1000)
    with KVPager(model, folder=tmp_path / "kept", host_bytes=1 << 20) as pager:
        pager._keeper._batch = lambda rows: 16  # type: ignore[method-assign]
        generate(model, prompt, pager.cache(prompt), count=2)
        pager.flush()
        space = pager._keeper._home.space(pager._shape.layout)
        assert space is not None
        leases = []
        match = type(space).match

        def matched(self: Any, *args: Any, **options: Any) -> Any:
            leases.append(match(self, *args, **options))
            return leases[-1]

        def failing(self: Any, *args: Any, **options: Any) -> Any:
            raise ColdTierError("the disk is gone")

        monkeypatch.setattr(type(space), "match", matched)
        monkeypatch.setattr(type(space), "load", failing)
        pager._keeper._batch = lambda rows: 62  # type: ignore[method-assign]
        assert pager.cache(prompt).loaded < 992
        assert any(lease.cold for lease in leases)
        assert not any(lease._held for lease in leases)


def test_a_pager_that_was_closed_says_so_and_its_caches_go_on(model: Any, store: HostStore) -> None:
    pager = KVPager(model, store=store)
    cache = pager.cache(PROMPT)
    pager.close()
    assert generate(model, PROMPT, cache).equal(generate(model, PROMPT))
    with pytest.raises(ClosedError):
        pager.cache(PROMPT)
    assert not model.model._forward_hooks


def test_what_nobody_has_any_more_has_kept_everything_and_ends(model: Any, store: HostStore) -> None:
    generate(model, PROMPT, KVPager(model, store=store).cache(PROMPT))
    assert not model.model._forward_hooks
    with KVPager(model, store=store) as pager:
        assert pager.cache(PROMPT).loaded == FOUND


@pytest.mark.parametrize(
    ("release", "supported"),
    [("4.56.2", False), ("4.57.0", True), ("5.0.0", True), ("5.24.0", True), ("6.0.0.dev0", False)],
)
def test_releases_of_transformers_that_are_supported_are_known(release: str, supported: bool) -> None:
    assert is_supported(release) is supported


@pytest.mark.full
def test_the_quick_start_of_the_page_runs_as_it_is_printed(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    page = (Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
    section = page.partition("## transformers")[2].partition("\n## ")[0]
    (source,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (name,) = re.findall(r"from_pretrained\(\"([^\"]+)\"", source)[:1]
    gguf = require_smollm2()
    # Its tokenizer, and a model that takes no time.
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(tmp_path / name)
    small = tiny_llama(1)
    small.resize_token_embeddings(len(tokenizer))
    small.save_pretrained(tmp_path / name)
    (tmp_path / "report.txt").write_text("The pump of hall three was replaced in May. " * 60)
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", source],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.splitlines())
    assert re.fullmatch(r"0 of \d+ tokens were there", lines[0][0])
    there, whole = map(int, re.fullmatch(r"(\d+) of (\d+) tokens were there", lines[1][0]).groups())  # type: ignore[union-attr]
    assert whole - BLOCK <= there < whole
    assert lines[0][1:] == lines[1][1:]


@pytest.mark.full
def test_a_real_model_says_the_same_with_a_hit(store: HostStore) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = require_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    inputs = tokenizer("The quick brown fox jumps over the lazy dog. " * 30, return_tensors="pt")
    expected = generate(model, inputs["input_ids"])
    host = HostStore(64 << 20)
    with KVPager(model, store=host) as pager:
        for loaded in (0, (inputs["input_ids"].shape[1] - 1) // BLOCK * BLOCK):
            pager.flush()
            cache = pager.cache(**inputs)
            assert cache.loaded == loaded
            assert generate(model, inputs["input_ids"], cache).equal(expected)
    host.close()
