"""The load-or-recompute gate: time to the first token of a prompt that only the cold tier has.

A disk tier is held to so many bytes a second. One engine loads what pays, one whatever is there, and one has
no cold tier and computes the prompt; they take turns on the same model, so that what else the machine does
hits all of them alike. Told are medians; by then the first engine knows the tier, as after a few requests.

    python benchmarks/gate.py [--model MODEL] [--tokens N] [--rates BYTES,BYTES] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from kvpager.benchmarks.report import write_report
from kvpager.engine.llm import LLM
from kvpager.engine.loader import LoadedModel, load_model
from kvpager.engine.sampler import SamplingParams
from kvpager.kvstore.space import HostSpace
from kvpager.tests.throttled_disk import ThrottledDisk

ONE: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
RATES: Final = 40e6, 4e6, 0.4e6
LEARN: Final = 4
"""Requests before any is counted."""


class Contender:
    """An engine whose KV is in its cold tier alone before each request.

    Args:
        loaded: the model.
        folder: of its cold tier; None: it has none.
        gate: whether it loads only what pays.
    """

    def __init__(self, loaded: LoadedModel, folder: Path | None, *, gate: bool) -> None:
        self.disk = None if folder is None else ThrottledDisk(folder)
        self.llm = LLM(
            loaded, block_size=16, device_bytes=512 << 20, host_bytes=1 << 30, cold=self.disk, gate=gate,
            load_seconds=60.0,
        )  # fmt: skip

    def ask(self, tokens: list[int]) -> float:
        """Seconds to the first token of a prompt."""
        (done,) = self.llm.generate([tokens], ONE)
        llm = self.llm
        llm.store.poll()
        llm.store.evict(llm.store.pool.capacity)
        if llm.host is None or not isinstance(llm.store.host, HostSpace):
            raise TypeError("a contender has host memory of its own")
        llm.host.flush(60.0)
        while llm.store.host.resident:
            llm.store.host.evict(llm.store.host.capacity)
        return done.first_token_seconds


def random_model(folder: Path) -> Path:
    """A model whose prefill takes some hundred milliseconds on a CPU."""
    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=2000,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=1,
    )
    torch.manual_seed(1)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).eval().save_pretrained(folder)
    return folder


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="as of LLM; a random Llama of 4 layers where none is named")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default=RATES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loaded = load_model(options.model or random_model(folder / "model"))
        contenders = {
            "computed": Contender(loaded, None, gate=True),
            "gated": Contender(loaded, folder / "gated", gate=True),
            "loaded": Contender(loaded, folder / "loaded", gate=False),
        }
        for one in contenders.values():
            stack.callback(one.llm.close)
            for number in range(1, 6):  # what computing takes is known
                one.ask(random.integers(0, 1000, options.tokens * number // 5).tolist())
        tokens = random.integers(0, 1000, options.tokens).tolist()
        for rate in options.rates:
            for one in contenders.values():
                if one.disk is not None:
                    one.disk.bytes_per_second = rate
            for _ in range(LEARN):
                contenders["gated"].ask(tokens)
            contenders["loaded"].ask(tokens)
            taken: dict[str, list[float]] = {name: [] for name in contenders}
            for turn in range(options.rounds):
                for at in range(len(contenders)):
                    name = list(contenders)[(turn + at) % len(contenders)]
                    taken[name].append(contenders[name].ask(tokens))
            row = {"bytes_per_second": rate} | {
                name: statistics.median(times) for name, times in taken.items()
            }
            rows.append(row)
            print(
                f"{rate / 1e6:8.1f} MB/s  computed {row['computed'] * 1e3:8.1f} ms  "
                f"gated {row['gated'] * 1e3:8.1f} ms  loaded {row['loaded'] * 1e3:8.1f} ms"
            )
    if options.json:
        model = options.model or "a random Llama of 4 layers"
        write_report(options.json, {"model": model, "tokens": options.tokens, "rows": rows}, "torch")


if __name__ == "__main__":
    main()
