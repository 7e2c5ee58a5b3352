"""`kvpager size`: bytes of a token, what tiers hold of sessions, and files that describe models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from kvpager.api.cli import main
from kvpager.api.gguf_metadata import read_metadata
from kvpager.api.measurements import Measurement, Measurements, Unit, keep
from kvpager.tests.model_files import require_smollm2
from kvpager.tiers.errors import ModelError

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "float16",
    "max_position_embeddings": 131072,
}
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine is found: no settings and no measurements."""
    for name in list(os.environ):
        if name.startswith("KVPAGER_"):
            monkeypatch.delenv(name)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def folder_of(tmp_path: Path, config: object, **more: object) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    said = {**config, **more} if isinstance(config, dict) else config
    (folder / "config.json").write_text(json.dumps(said))
    return str(folder)


def sized(capsys: Output, *arguments: str) -> dict[str, Any]:
    assert main(["size", "--json", "--host-bytes", "64G", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def groups(found: dict[str, Any]) -> list[tuple[int, int, int, int | None]]:
    """Layers, KV heads, bytes of a token and window of each group."""
    return [(one["layers"], one["kv_heads"], one["token_bytes"], one["window"]) for one in found["groups"]]


def test_a_llama_of_70b_takes_a_third_of_a_megabyte_a_token_and_not_2_6(
    tmp_path: Path, capsys: Output
) -> None:
    folder = folder_of(tmp_path, LLAMA_70B)
    found = sized(capsys, folder, "--tokens", "32768", "--vram", "40G", "--cold-bytes", "1T")
    assert found["token_bytes"] == 2 * 80 * 8 * 128 * 2 == 327_680
    assert found["token_bytes_by_query_heads"] == 2 * 80 * 64 * 128 * 2 == 2_621_440
    assert found["session_bytes"] == 32768 * 327_680
    assert [(one["tier"], one["sessions"], one["tokens"]) for one in found["rooms"]] == [
        ("vram", 4, 4 * 32768),
        ("host", 6, 6 * 32768),
        ("cold", 102, 102 * 32768),
    ]
    assert main(["size", folder]) == 0
    shown = capsys.readouterr().out
    assert "2 (K and V) x 80 layers x 8 KV heads x 128 x 2 bytes (float16) = 327,680 bytes" in shown
    assert "(Not 2,621,440: query heads share KV heads" in shown
    assert "8 times too high" in shown
    assert "10.7 GB (10.0 GiB), 2,048 blocks" in shown


def test_a_model_may_be_told_by_its_figures(capsys: Output) -> None:
    figures = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]
    found = sized(capsys, *figures, "--query-heads", "32", "--dtype", "uint8", "--tokens", "17")
    assert found["token_bytes"] == 2 * 32 * 8 * 128
    assert found["token_bytes_by_query_heads"] == 2 * 32 * 32 * 128
    assert found["session_bytes"] == 2 * 16 * found["token_bytes"]  # two blocks of 16 tokens
    assert sized(capsys, *figures, "--block-size", "32")["groups"][0]["block_bytes"] == 32 * 131_072


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"num_key_value_heads": None}, [(4, 8, 8192, None)], id="heads of their own"),
        pytest.param({"head_dim": 128}, [(4, 2, 4096, None)], id="head_dim"),
        pytest.param({"torch_dtype": "float32"}, [(4, 2, 4096, None)], id="float32"),
        pytest.param(
            {"model_type": "mistral", "sliding_window": 64}, [(4, 2, 2048, 64)], id="every layer slides"
        ),
        pytest.param({"model_type": "mistral", "sliding_window": None}, [(4, 2, 2048, None)], id="no window"),
        pytest.param(
            {
                "model_type": "qwen2",
                "sliding_window": 64,
                "use_sliding_window": False,
                "max_window_layers": 1,
            },
            [(4, 2, 2048, None)],
            id="a window that is off",
        ),
        pytest.param(
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            [(1, 2, 512, None), (3, 2, 1536, 64)],
            id="the first layers see everything",
        ),
        pytest.param(
            {"model_type": "gemma2", "sliding_window": 64},
            [(2, 2, 1024, 64), (2, 2, 1024, None)],
            id="every other layer",
        ),
        pytest.param(
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64},
            [(2, 2, 1024, 64), (2, 2, 1024, None)],
            id="layer types",
        ),
        pytest.param(
            {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            [(1, 2, 512, None)],
            id="layers without KV",
        ),
        pytest.param(
            {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "attention_chunk_size": 32},
            [(3, 2, 1536, 32), (1, 2, 512, None)],
            id="chunks",
        ),
        pytest.param(
            {"attn_layer_period": 4, "attn_layer_offset": 1}, [(1, 2, 512, None)], id="attention now and then"
        ),
        pytest.param(
            {"num_key_value_heads": [2, 2, 1, 1]}, [(2, 2, 1024, None), (2, 1, 512, None)], id="mixed"
        ),
        pytest.param({"num_kv_shared_layers": 3}, [(1, 2, 512, None)], id="shared layers"),
        pytest.param({"multi_query": True}, [(4, 1, 1024, None)], id="multi-query"),
        pytest.param(
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, [(4, 1, 4 * 576 * 2, None)], id="latents"
        ),
    ],
)
def test_what_layers_keep_is_read_from_config_json(
    config: dict[str, object],
    expected: list[tuple[int, int, int, int | None]],
    tmp_path: Path,
    capsys: Output,
) -> None:
    usual = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "bfloat16",
    }
    folder = folder_of(tmp_path, usual, **config)
    assert groups(sized(capsys, folder, "--tokens", "100")) == expected
    nested = tmp_path / "model" / "config.json"
    nested.write_text(json.dumps({"model_type": "seeing", "text_config": {**usual, **config}}))
    assert groups(sized(capsys, str(nested), "--tokens", "100")) == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "must hold a JSON object, not list"),
        ({**LLAMA_70B, "num_attention_heads": 0}, "its num_attention_heads must be at least 1"),
        ({**LLAMA_70B, "num_attention_heads": 7}, "dimensions are not divided evenly among 7 heads"),
        ({**LLAMA_70B, "num_hidden_layers": 10**20}, "must be a whole number up to 2147483647"),
        ({}, "it does not say its num_hidden_layers: give its figures by options"),
        (
            {"num_hidden_layers": "many"},
            "its num_hidden_layers must be a whole number up to 2147483647, not 'many'",
        ),
        ({**LLAMA_70B, "num_key_value_heads": [8]}, "its num_key_value_heads must be a whole number, or one"),
        ({**LLAMA_70B, "layer_types": ["dream"] * 80}, "it has layers of type dream, which are not known"),
        ({**LLAMA_70B, "layer_types": ["full_attention"]}, "its layer_types must name each of 80 layers"),
        ({**LLAMA_70B, "layer_types": ["mamba"] * 80}, "none of its layers keeps KV"),
    ],
)
def test_what_a_config_json_lacks_is_told_of_the_model(
    config: object, said: str, tmp_path: Path, capsys: Output
) -> None:
    assert main(["size", folder_of(tmp_path, config)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvpager size: MODEL: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_config_json_that_is_too_deep_is_told_of_the_model(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "config.json"
    file.write_text("[" * 100_000)
    assert main(["size", str(file)]) == 1
    assert "is neither a config.json nor a GGUF file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--layers: is needed where no MODEL is given"),
        (["--layers", "4", "--kv-heads", "2"], "--head-dim: is needed where no MODEL is given"),
        (["/no/model"], "MODEL: there is no model at /no/model"),
        (
            ["--layers", "0", "--kv-heads", "2", "--head-dim", "64"],
            "--layers: must be an integer of at least 1",
        ),
        (["/", "--kv-heads", "2"], "--kv-heads: is for a model without files, and MODEL names one"),
    ],
)
def test_options_that_make_no_sense_are_told_by_name(arguments: list[str], said: str, capsys: Output) -> None:
    assert main(["size", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"kvpager size: {said}")


def written_gguf(path: Path, **more: int) -> Path:
    """A GGUF file as the package of that name writes it, its tokenizer included."""
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_name("a model")
    writer.add_token_list(["a", "b", "longer than these"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_block_count(4)
    writer.add_embedding_length(512)
    writer.add_head_count(8)
    writer.add_head_count_kv(more.get("kv_heads", 2))
    writer.add_context_length(1000)
    if "window" in more:
        writer.add_sliding_window(more["window"])
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_read_as_its_own_package_reads_it(tmp_path: Path, capsys: Output) -> None:
    path = written_gguf(tmp_path / "model.gguf", window=64)
    found = sized(capsys, str(path))
    assert (found["model"], found["tokens"], found["query_heads"]) == ("a model", 1000, 8)
    assert groups(found) == [(4, 2, 2 * 4 * 2 * 64 * 2, None)]
    assert any("sliding window" in note for note in found["notes"])
    assert sized(capsys, str(tmp_path))["token_bytes"] == found["token_bytes"]
    metadata = read_metadata(path)
    fields: Any = gguf.GGUFReader(path).fields
    expected = {
        name: field.contents()
        for name, field in fields.items()
        if not name.startswith(("tokenizer.", "GGUF."))
    }
    assert metadata == expected


def test_a_gguf_file_that_ends_anywhere_is_told_to_be_cut_off(tmp_path: Path) -> None:
    whole = written_gguf(tmp_path / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    end = whole.index(b"llama.context_length")
    for length in range(4, end, 7):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_metadata(cut)
    tokens = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    cut.write_bytes(whole[: tokens + 8] + b"\xff" * 7 + b"\x00" + whole[tokens + 16 :])
    with pytest.raises(ModelError, match="cut off or damaged"):
        read_metadata(cut)


def test_the_model_that_is_a_package_is_found_by_its_name_and_without_torch() -> None:
    require_smollm2()
    program = (
        "import sys\nfrom kvpager.api.cli import main\ncode = main(['size', 'smollm2'])\n"
        "sys.exit(code + 10 * len({'torch', 'gguf', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "30 layers x 3 KV heads x 64 x 2 bytes (bfloat16) = 23,040 bytes" in done.stdout
    assert "A session of 8,192 tokens: 188.7 MB" in done.stdout


def test_wake_times_are_those_of_what_was_measured_here(tmp_path: Path, capsys: Output) -> None:
    folder = folder_of(tmp_path, LLAMA_70B)
    before = {one["way"]: one for one in sized(capsys, folder, "--tokens", "16")["wakes"]}
    nbytes = 16 * 327_680
    assert before["host_in_place"]["seconds"] == pytest.approx(nbytes / 51e9)
    assert "H200" in before["host_in_place"]["measured"]
    figures = (
        Measurement("host_read", "", 25e9, Unit.BYTES_PER_SECOND),
        Measurement("redis_get", "", 1e9, Unit.BYTES_PER_SECOND),
    )
    keep(Measurements("here", 0.0, "1", figures, {}), tmp_path / "xdg_state_home" / "kvpager" / "bench.json")
    after = {one["way"]: one for one in sized(capsys, folder, "--tokens", "16")["wakes"]}
    assert after["host_in_place"]["seconds"] == pytest.approx(nbytes / 25e9)
    assert after["redis"]["seconds"] == pytest.approx(nbytes / 1e9)
    assert after["redis"]["measured"].startswith("here, ")
    assert after["disk"] == before["disk"]


def test_measurements_that_cannot_be_read_are_told_with_what_to_do(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "xdg_state_home" / "kvpager" / "bench.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert main(["size", folder_of(tmp_path, LLAMA_70B)]) == 1
    assert capsys.readouterr().err == (
        f"kvpager size: {path}: holds no measurements that can be read: kvpager bench writes them anew\n"
    )


def test_a_block_that_no_extent_holds_is_told(tmp_path: Path, capsys: Output) -> None:
    folder = folder_of(tmp_path, LLAMA_70B)
    assert main(["size", folder, "--host-bytes", "64M", "--json"]) == 0
    assert "A block of 5.0 MiB fits no extent of 4.0 MiB" in " ".join(
        json.loads(capsys.readouterr().out)["notes"]
    )
