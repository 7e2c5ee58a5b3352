"""Decoding attention where the pages lie: in HBM, in host memory, in both, shared, installed as it is read.

Figures, each beside its ceiling or its peer in the same run, over the same bytes, taking turns:

    hbm      pages in HBM against FlashInfer's better mode and the read ceiling, uniform lengths
    ragged   the same with lengths drawn from a trace (``--trace``) or a log-normal distribution
    host     all pages in host memory against the ceiling of kernel reads, and copying first
    mixed    a share in host memory, spread and concentrated, against the longer of the two links' times
    shared   64 sequences that share a prefix, in host memory and in HBM
    install  installing while reading against reading alone, and the step after it
    plan     what planning a step costs

Results of two sequences of every case are compared with float64 before it is timed; what is wrong is not
timed, and the exit status says so. ``--tiny`` checks small cases and times nothing, also on a CPU.

    python benchmarks/decode_attention.py [--figures NAME,...] [--quick] [--trace FILE] [--out DIR]
    python benchmarks/decode_attention.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from kvpager import kernels
from kvpager.benchmarks.attention_bench import (
    ERROR_LIMIT,
    Batch,
    Bench,
    Deck,
    Decoding,
    Heads,
    Memory,
    Row,
    print_table,
    trace_lengths,
)
from kvpager.benchmarks.ceilings import (
    SECONDS,
    Contender,
    Work,
    captured,
    copies_batched,
    copies_one_by_one,
    eager,
    fastest,
    hbm_reads,
    host_reads,
    use_stream,
)
from kvpager.benchmarks.peers import flashinfer_decode
from kvpager.benchmarks.report import write_report
from kvpager.tiers.layout import KVLayout

LLAMA: Final = Heads(32, 8, 128)
SMALL: Final = Heads(9, 3, 64)
WIDE: Final = Heads(64, 8, 128)
SHARES: Final = (0.005, 0.01, 0.0125, 0.02, 0.05, 0.2)
BLOCK_COPY_BYTES: Final = 2 << 20
"""A block of 16 tokens of all 32 layers of an 8B model: what copying whole blocks copies at once."""


@dataclass(frozen=True)
class Sizes:
    """Sequences and tokens of the cases."""

    hbm: Sequence[tuple[Heads, int, int]]
    ragged: Sequence[int]
    shortened: int
    host: Sequence[tuple[Heads, int, int]]
    copied: tuple[int, int]
    mixed: tuple[int, int]
    shares: Sequence[float]
    shared: tuple[int, int, int]
    install: tuple[int, int]
    plan: Sequence[tuple[int, int]]


FULL: Final = Sizes(
    hbm=(
        (LLAMA, 1, 32768),
        (LLAMA, 8, 8192),
        (LLAMA, 16, 4096),
        (LLAMA, 64, 2048),
        (LLAMA, 256, 1024),
        (LLAMA, 64, 8192),
        (LLAMA, 256, 4096),
        (WIDE, 1, 32768),
        (WIDE, 64, 2048),
        (WIDE, 64, 8192),
        (SMALL, 1, 32768),
        (SMALL, 64, 8192),
        (SMALL, 256, 4096),
    ),
    ragged=(16, 64, 256),
    shortened=1,
    host=((LLAMA, 1, 32768), (LLAMA, 16, 4096), (LLAMA, 64, 2048), (SMALL, 64, 8192)),
    copied=(16, 4096),
    mixed=(64, 8192),
    shares=SHARES,
    shared=(64, 8192, 64),
    install=(16, 4096),
    plan=((1, 32768), (64, 8192), (256, 4096), (1024, 4096)),
)
QUICK: Final = Sizes(
    hbm=((LLAMA, 1, 32768), (LLAMA, 16, 4096), (LLAMA, 64, 8192), (SMALL, 64, 8192)),
    ragged=(64,),
    shortened=1,
    host=((LLAMA, 16, 4096),),
    copied=(16, 4096),
    mixed=(64, 8192),
    shares=(0.005, 0.0125, 0.05),
    shared=(64, 8192, 64),
    install=(16, 4096),
    plan=((64, 8192),),
)
TINY: Final = Sizes(
    hbm=((LLAMA, 1, 200), (LLAMA, 3, 77), (WIDE, 2, 48), (SMALL, 4, 33), (LLAMA, 5, 1)),
    ragged=(7,),
    shortened=64,
    host=((LLAMA, 2, 90), (SMALL, 3, 65)),
    copied=(2, 64),
    mixed=(6, 160),
    shares=(0.02, 0.2),
    shared=(5, 96, 20),
    install=(3, 70),
    plan=(),
)


# ---- 1: pages in HBM ----


def against_peer(bench: Bench, heads: Heads, lengths: Sequence[int], case: str) -> Row:
    row: Row = {}
    layout = heads.layout()
    nbytes = sum(lengths) * layout.token_bytes
    stored = sum(layout.blocks_for(length) for length in lengths) * layout.block_bytes
    deck = Deck(bench.memory, layout, seed=1)
    batches = [Batch.dealt(bench.memory, layout, deck, lengths) for _ in range(bench.sets(stored))]
    decoding = Decoding(bench.memory, heads, layout, batches)
    if not bench.judge(case, decoding.error(), row):
        return row
    contenders = {"kvpager": captured(decoding.steps), **hbm_reads(bench.memory.near, nbytes)}
    contenders |= flashinfer_decode.contenders(bench, decoding, row)
    times = bench.race(contenders)
    rates = {name: nbytes / timing.seconds / 1e9 for name, timing in times.items()}
    ours, ceiling = rates["kvpager"], nbytes / fastest(times, "hbm read").seconds / 1e9
    row |= {"MB": nbytes / 1e6, "sets": len(batches), "us": times["kvpager"].us}
    row |= {"spread": times["kvpager"].spread, "GB/s": ours}
    row |= {name: rates[name] for name in rates if name.startswith("flashinfer")}
    row |= {"ceiling": ceiling, "of ceiling": ours / ceiling}
    peers = [rate for name, rate in rates.items() if name.startswith("flashinfer")]
    if peers:
        row["of peer"] = ours / max(peers)
        row["target"] = ours >= max(max(peers), min(1.10 * max(peers), 0.96 * ceiling))
    return row


def figure_hbm(bench: Bench, sizes: Sizes) -> list[Row]:
    """Uniform lengths, pages in HBM in random order."""
    return [
        against_peer(bench, heads, [length] * seqs, f"{heads} B{seqs} x {length}")
        for heads, seqs, length in sizes.hbm
    ]


def figure_ragged(bench: Bench, sizes: Sizes) -> list[Row]:
    """Lengths as requests have them, where a split that does not look at them loses."""
    rows = []
    kind = "trace" if bench.trace is not None and bench.trace.exists() else "log-normal"
    for seqs in sizes.ragged:
        lengths = [max(1, n // sizes.shortened) for n in trace_lengths(bench.trace, seqs, seed=seqs)]
        case = f"{LLAMA} B{seqs}, {kind}, {min(lengths)} to {max(lengths)}, mean {sum(lengths) // seqs}"
        rows.append(against_peer(bench, LLAMA, lengths, case))
    return rows


# ---- 2: pages in host memory ----


def figure_host(bench: Bench, sizes: Sizes) -> list[Row]:
    """All pages in host memory, in random order."""
    rows = []
    for heads, seqs, length in sizes.host:
        layout = heads.layout()
        nbytes = seqs * length * layout.token_bytes
        deck = Deck(bench.memory, layout, seed=2)
        sets = min(2, bench.sets(nbytes, far=True))
        batches = [Batch.dealt(bench.memory, layout, deck, [length] * seqs, far=True) for _ in range(sets)]
        decoding = Decoding(bench.memory, heads, layout, batches)
        row: Row = {}
        rows.append(row)
        if not bench.judge(f"{heads} B{seqs} x {length}", decoding.error(), row):
            continue
        contenders = {"kvpager": captured(decoding.steps)}
        contenders |= host_reads(bench.memory.far, nbytes, layout.slice_bytes)
        if heads is LLAMA and (seqs, length) == sizes.copied:
            contenders |= copy_then_attend(bench, deck, batches[0], heads, layout)
        times = bench.race(contenders)
        rates = {name: nbytes / timing.seconds / 1e9 for name, timing in times.items()}
        row |= {"MB": nbytes / 1e6, "us": times["kvpager"].us, "GB/s": rates["kvpager"]}
        row["linear"] = nbytes / fastest(times, "host read linear").seconds / 1e9
        row["slices"] = nbytes / fastest(times, "host read pages").seconds / 1e9
        row["of ceiling"] = fastest(times, "host read").seconds / times["kvpager"].seconds
        row["target"] = row["of ceiling"] >= 0.99
        row |= {name: rates[name] for name in rates if name.startswith("copy")}
    return rows


def copy_then_attend(
    bench: Bench, deck: Deck, batch: Batch, heads: Heads, layout: KVLayout
) -> dict[str, Contender]:
    """Copying a layer's pages to HBM and attending there: page by page, by one call, and blocks by one call.

    Single copies are nodes of a graph, which takes the calls' time out, in their favour. A batch is not
    captured, and its submission is hidden. Whole blocks of 32 layers are contiguous pieces of 2 MiB, whose
    copies serve 32 steps; here as many bytes as one step reads are copied in such pieces.
    """
    near = Batch.dealt(bench.memory, layout, deck, batch.lengths)
    attend = captured(Decoding(bench.memory, heads, layout, [near]).steps, turns=1)
    far_at, near_at = bench.memory.far.data_ptr(), bench.memory.near.data_ptr()
    src = (far_at + batch.ids.flatten() * layout.block_bytes).tolist()
    dst = (near_at + near.ids.flatten() * layout.block_bytes).tolist()
    total = len(src) * layout.block_bytes
    pieces = range(0, total - BLOCK_COPY_BYTES + 1, BLOCK_COPY_BYTES)
    one_by_one = captured([copies_one_by_one(src, dst, layout.block_bytes)], turns=1)
    batched = copies_batched(src, dst, layout.block_bytes)
    blocks = copies_batched([far_at + at for at in pieces], [near_at + at for at in pieces], BLOCK_COPY_BYTES)

    def then_attend(copy: Work) -> Work:
        def work() -> None:
            copy()
            attend.run()

        return work

    hide_ms = 40.0
    return {
        "copy pages": eager(then_attend(one_by_one.run), hide_ms),
        "copy pages, one call": eager(then_attend(batched), hide_ms),
        "copy 2 MiB, one call": eager(then_attend(blocks), hide_ms),
    }


# ---- 3: some pages in host memory ----


def figure_mixed(bench: Bench, sizes: Sizes) -> list[Row]:
    """A share of the blocks in host memory: of all sequences, and of the first few alone."""
    rows = []
    layout = LLAMA.layout()
    seqs, length = sizes.mixed
    blocks = seqs * layout.blocks_for(length)
    generator = torch.Generator().manual_seed(3)
    for share in sizes.shares:
        for how in ("spread", "concentrated"):
            chosen = max(1, round(share * blocks))
            deck = Deck(bench.memory, layout, seed=3)
            batches = []
            for _ in range(min(2, bench.sets(blocks * layout.block_bytes))):
                order = (
                    torch.randperm(blocks, generator=generator) if how == "spread" else torch.arange(blocks)
                )
                far = torch.zeros(blocks, dtype=torch.bool)
                far[order[:chosen]] = True
                batches.append(Batch.dealt(bench.memory, layout, deck, [length] * seqs, far.view(seqs, -1)))
            decoding = Decoding(bench.memory, LLAMA, layout, batches)
            row: Row = {}
            rows.append(row)
            if not bench.judge(f"{share:.2%} {how}", decoding.error(), row):
                continue
            far_bytes, near_bytes = batches[0].far_bytes, batches[0].near_bytes
            contenders = {"kvpager": captured(decoding.steps)}
            contenders |= hbm_reads(bench.memory.near, near_bytes)
            contenders |= host_reads(bench.memory.far, far_bytes, layout.page_bytes)
            times = bench.race(contenders)
            hbm, pcie = fastest(times, "hbm read").seconds, fastest(times, "host read").seconds
            ratio = times["kvpager"].seconds / max(hbm, pcie)
            balanced = max(hbm, pcie) < 1.2 * min(hbm, pcie)
            row |= {"host MB": far_bytes / 1e6, "HBM MB": near_bytes / 1e6, "us": times["kvpager"].us}
            row |= {"PCIe us": pcie * 1e6, "HBM us": hbm * 1e6, "of max": ratio, "balanced": balanced}
            row["target"] = ratio <= (1.10 if balanced else 1.05)
    return rows


# ---- 4: a shared prefix ----


def shared_batch(
    bench: Bench,
    deck: Deck,
    layout: KVLayout,
    seqs: int,
    prefix: torch.Tensor,
    tokens: int,
    tail: int,
    far: bool,
) -> Batch:
    """Sequences whose first blocks are ``prefix``: [blocks], or [seqs, blocks] of their own; tails in HBM."""
    tails = deck.deal(seqs * layout.blocks_for(tail), False).view(seqs, -1)
    ids = torch.cat((prefix.expand(seqs, -1), tails), 1)
    where = torch.zeros(ids.shape, dtype=torch.bool)
    where[:, : prefix.shape[-1]] = far
    return Batch.over(bench.memory, layout, [tokens + tail] * seqs, ids, where)


def figure_shared(bench: Bench, sizes: Sizes) -> list[Row]:
    """Many sequences behind one prefix: in host memory it crosses once, in HBM it is read once."""
    layout = LLAMA.layout()
    seqs, tokens, tail = sizes.shared
    if tokens % layout.block_size:
        raise SystemExit(f"a shared prefix is whole blocks, {tokens} tokens are not")
    blocks = tokens // layout.block_size
    deck = Deck(bench.memory, layout, seed=4)
    kinds: dict[str, list[Batch]] = {
        "host, shared": [],
        "host, one": [],
        "HBM, shared": [],
        "HBM, unshared": [],
    }
    for _ in range(4):
        prefix, near = deck.deal(blocks, True), deck.deal(blocks, False)
        parts = (deck, layout)
        kinds["host, shared"].append(shared_batch(bench, *parts, seqs, prefix, tokens, tail, True))
        kinds["host, one"].append(shared_batch(bench, *parts, 1, prefix, tokens, tail, True))
        kinds["HBM, shared"].append(shared_batch(bench, *parts, seqs, near, tokens, tail, False))
    for _ in range(min(2, bench.sets((blocks + 8) * seqs * layout.block_bytes))):
        own = deck.deal(seqs * blocks, False).view(seqs, -1)
        kinds["HBM, unshared"].append(shared_batch(bench, deck, layout, seqs, own, tokens, tail, False))
    rows: dict[str, Row] = {}
    contenders: dict[str, Contender] = {}
    for name, batches in kinds.items():
        rows[name] = {}
        decoding = Decoding(bench.memory, LLAMA, layout, batches)
        case = f"{name}: {len(batches[0].lengths)} x ({tokens} + {tail})"
        if bench.judge(case, decoding.error(), rows[name]):
            contenders[name] = captured(decoding.steps)
            if name == "HBM, shared":
                peers = flashinfer_decode.contenders(bench, decoding, rows[name])
                contenders |= {f"{peer}, {name}": contender for peer, contender in peers.items()}
    times = bench.race(contenders)
    for name, row in rows.items():
        if name in times:
            row["us"] = times[name].us
    for peer in ("flashinfer", "flashinfer tc"):
        if f"{peer}, HBM, shared" in times:
            rows["HBM, shared"][f"{peer} us"] = times[f"{peer}, HBM, shared"].us
    if "host, shared" in times and "host, one" in times:
        ratio = times["host, shared"].seconds / times["host, one"].seconds
        rows["host, shared"] |= {"against": "host, one", "times": ratio, "target": ratio <= 1.1}
    if "HBM, shared" in times and "HBM, unshared" in times:
        gain = times["HBM, unshared"].seconds / times["HBM, shared"].seconds
        rows["HBM, unshared"] |= {"against": "HBM, shared", "times": gain, "target": gain >= 5}
    return list(rows.values())


# ---- 5: install ----


def figure_install(bench: Bench, sizes: Sizes) -> list[Row]:
    """Pages written to VRAM as they are read, and the step that finds them there."""
    layout = LLAMA.layout()
    seqs, length = sizes.install
    lengths = [length] * seqs
    deck = Deck(bench.memory, layout, seed=5)
    reads, tagged, installed, targets, plain = [], [], [], [], []
    for _ in range(2):
        read = Batch.dealt(bench.memory, layout, deck, lengths, far=True)
        after = Batch.dealt(bench.memory, layout, deck, lengths)
        reads.append(read)
        tagged.append(Batch.over(bench.memory, layout, lengths, read.ids, read.far, install=True))
        installed.append(after)
        targets.append(after.words.clone())
        plain.append(Batch.dealt(bench.memory, layout, deck, lengths))
    near = bench.memory.blocks(layout, False)
    for batch in installed:
        near[batch.ids.flatten().to(near.device)] = torch.nan
    read_only = Decoding(bench.memory, LLAMA, layout, reads)
    installing = Decoding(bench.memory, LLAMA, layout, tagged, targets)
    case = f"B{seqs} x {length}"
    rows: list[Row] = [{}, {}]
    timed = bench.judge(f"{case}, read alone", read_only.error(), rows[0])
    timed &= bench.judge(f"{case}, installing", installing.error(), rows[1])
    copied = True
    for step, batch, after in zip(installing.steps, tagged, installed, strict=True):
        step()
        found = near[after.ids.flatten().to(near.device)]
        far = bench.memory.blocks(layout, True)
        source = far[batch.ids.flatten()].to(near.device)
        copied &= torch.equal(found.view(torch.int16), source.view(torch.int16))
    rows[1]["bytes equal"] = copied
    if not copied:
        bench.wrong.append(f"{case}: installed bytes")
        return rows
    following = Decoding(bench.memory, LLAMA, layout, installed)
    elsewhere = Decoding(bench.memory, LLAMA, layout, plain)
    rows.append({})
    timed &= bench.judge(f"{case}, the step after", following.error(), rows[2])
    if not timed:
        return rows
    install = captured(installing.steps)
    contenders = {"read": captured(read_only.steps), "install": install}
    for name, decoding in (("next", following), ("HBM", elsewhere)):
        once = captured(decoding.steps, turns=1)
        contenders[name] = Contender(once.run, once.steps, before=install.run, keep=(once, install))
    times = bench.race(contenders)
    slower = times["install"].seconds / times["read"].seconds
    following_ratio = times["next"].seconds / times["HBM"].seconds
    rows[0] |= {"us": times["read"].us}
    rows[1] |= {"us": times["install"].us, "against": "read alone", "times": slower, "target": slower <= 1.03}
    rows[2] |= {"us": times["next"].us, "against": "HBM", "times": following_ratio}
    rows[2]["target"] = following_ratio <= 1.03
    return rows


# ---- planning ----


def figure_plan(bench: Bench, sizes: Sizes) -> list[Row]:
    """What `decode_plan` costs, once a step for all layers."""
    rows = []
    layout = LLAMA.layout()
    for seqs, length in sizes.plan:
        deck = Deck(bench.memory, layout, seed=6)
        batch = Batch.dealt(bench.memory, layout, deck, [length] * seqs)

        def plan(batch: Batch = batch) -> None:
            kernels.decode_plan(batch.words, batch.lens, layout)

        row: Row = {"case": f"{LLAMA} B{seqs} x {length}", "captured": True}
        rows.append(row)
        if not bench.timed:
            continue
        try:
            contender = captured([plan])
        except RuntimeError as error:
            # It would be a defect, but one that the other figures stand without.
            row |= {"captured": False, "why": str(error)[:200]}
            contender = eager(plan, 1.0)
        row["us"] = bench.race({"plan": contender})["plan"].us
    return rows


FIGURES: Final[dict[str, tuple[str, Callable[[Bench, Sizes], list[Row]]]]] = {
    "hbm": ("1. Pages in HBM, GB/s", figure_hbm),
    "ragged": ("1. Pages in HBM, lengths of requests, GB/s", figure_ragged),
    "host": ("2. All pages in host memory, GB/s", figure_host),
    "mixed": ("3. A share of the pages in host memory", figure_mixed),
    "shared": ("4. A shared prefix", figure_shared),
    "install": ("5. Installing while reading", figure_install),
    "plan": ("Planning a step", figure_plan),
}


def main() -> None:
    """Check, measure, print, and write what ``--out`` names."""
    arguments = _arguments()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        use_stream()
    sizes = TINY if arguments.tiny else QUICK if arguments.quick else FULL
    near, far = (
        (96 << 20, 64 << 20) if arguments.tiny else (arguments.near_gib << 30, arguments.far_gib << 30)
    )
    peer = flashinfer_decode.is_installed() and device.type == "cuda" and not arguments.tiny
    if not peer and not arguments.tiny:
        print("FlashInfer takes no part: it is not installed (benchmarks/peers/setup_flashinfer)")
    bench = Bench(
        Memory(device, near, far),
        timed=not arguments.tiny,
        seconds=arguments.seconds / 3 if arguments.quick else arguments.seconds,
        peer=peer,
        trace=arguments.trace,
    )
    results: dict[str, Any] = {"error_limit": ERROR_LIMIT, "figures": {}}
    for name in arguments.figures:
        title, figure = FIGURES[name]
        rows = figure(bench, sizes)
        results["figures"][name] = rows
        print_table(title, rows)
        if arguments.out is not None:
            # After each figure, so that what was measured is there if a later one fails.
            arguments.out.mkdir(parents=True, exist_ok=True)
            path = arguments.out / "decode_attention.json"
            write_report(path, results, "torch", "flashinfer-python", "cupy-cuda13x", "cuda-bindings")
    if bench.wrong:
        sys.exit(f"wrong results: {', '.join(bench.wrong)}")


def _arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in FIGURES]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"no such figure: {', '.join(unknown)} (of {', '.join(FIGURES)})"
            )
        return chosen

    parser = argparse.ArgumentParser(description="Decoding attention where the pages lie.")
    parser.add_argument("--figures", type=names, default=list(FIGURES), help=f"of {','.join(FIGURES)}")
    parser.add_argument("--quick", action="store_true", help="few cases, a third of the time for each")
    parser.add_argument("--tiny", action="store_true", help="small cases, checked and not timed")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests whose lengths `ragged` draws from"
    )
    parser.add_argument("--near-gib", type=int, default=24, help="device memory that blocks are drawn from")
    parser.add_argument("--far-gib", type=int, default=4, help="host memory, page-locked at 0.7 s a GiB")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="device time of each contender")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write decode_attention.json here")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("nothing is timed on a CPU: give --tiny")
    return arguments


if __name__ == "__main__":
    main()
