"""Measure what codes of gradients cost the host, in operations of torch and compiled by numba, beside a copy.

    python scripts/bench_codes.py
    python scripts/bench_codes.py --megabytes 1,8 --rounds 30 --json codes.json

Times each operation of a codec on slices of fp32, on one thread: encoding with a residual, adding up what a peer has
sent, encoding the sum and taking what its code stands for, decoding. A copy reads and writes as many bytes as the
operation has to. All take turns in one process, in rounds, so that a slow moment of the machine hits all.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from bench_kit import record
from bench_kit.options import add_results, make_parser, positive_int, positive_numbers
from bench_kit.rounds import spread, turns
from bench_kit.tables import print_table
from ddp_crossover.addons.codes.block_int8 import BlockInt8
from ddp_crossover.addons.codes.choice import compiled
from ddp_crossover.addons.codes.codec import Codec
from ddp_crossover.addons.codes.top_k import Selector, TopKCodec

# What legs do with them: sums do not travel as top-k.
CODECS: dict[str, tuple[type[Codec], tuple[Any, ...], tuple[str, ...]]] = {
    "int8": (BlockInt8, (), ("encode", "add", "encode sum", "decode")),
    "top-k 1%": (TopKCodec, (0.01, Selector.CHUNKED), ("encode", "add")),
    "top-k 1%, exact": (TopKCodec, (0.01, Selector.EXACT), ("encode", "add")),
}
FLOAT_BYTES = 4
# How often an fp32 is read or written for each element: values, residual, what is left out; the sum, twice; the sum,
# twice, and what is left out; the result.
FLOATS = {"encode": 3, "add": 2, "encode sum": 3, "decode": 1}


class Slices(NamedTuple):
    """The memory that operations work on."""

    values: Tensor
    residual: Tensor
    left_out: Tensor
    total: Tensor
    payload: Tensor


def jobs(codec: Codec, memory: Slices) -> dict[str, Callable[[], None]]:
    """The operations of a codec."""
    values, residual, left_out, total, payload = memory
    return {
        "encode": lambda: codec.encode(values, residual, left_out, payload),
        "encode sum": lambda: codec.encode_sum(total, left_out, payload),
        "add": lambda: codec.add(payload, total),
        "decode": lambda: codec.decode(payload, total),
    }


def copy_of(read_and_written: float) -> Callable[[], None]:
    """Copies so many bytes, half of which are read, and half are written."""
    source = torch.ones(int(read_and_written / 2), dtype=torch.uint8)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return copy


def measure(name: str, numel: int, rounds: int) -> list[dict[str, Any]]:
    """Nanoseconds an element of each operation of a codec; one row for each."""
    kind, arguments, operations = CODECS[name]
    kinds = {"torch": kind, **({"numba": compiled()[kind]} if kind in compiled() else {})}
    codecs = {by: one(*arguments) for by, one in kinds.items()}
    payload_bytes = next(iter(codecs.values())).payload_bytes(numel)
    generator = torch.Generator().manual_seed(0)

    def memory() -> Slices:
        values = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()
        rest = (values * 0.1, torch.empty(numel), values.clone())
        return Slices(values, *rest, torch.empty(payload_bytes, dtype=torch.uint8))

    of_codecs = {by: jobs(codec, memory()) for by, codec in codecs.items()}
    rows = []
    for operation in operations:
        candidates = {by: of_codec[operation] for by, of_codec in of_codecs.items()}
        candidates["copy"] = copy_of(FLOATS[operation] * FLOAT_BYTES * numel + payload_bytes)
        for prepare in of_codecs.values():  # a payload that is one, and memory that is there
            prepare["encode"]()
        times_ns: dict[str, list[float]] = {by: [] for by in candidates}
        names = list(candidates)
        for turn in turns(len(names), rounds):
            job = candidates[names[turn.index]]
            job()
            begin_s = time.perf_counter()
            job()
            times_ns[names[turn.index]].append((time.perf_counter() - begin_s) * 1e9 / numel)
        rows.append({"codec": name, "numel": numel, "operation": operation, "ns_per_element": times_ns})
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    times_ns = row["ns_per_element"]

    def cell(by: str) -> str:
        if by not in times_ns:
            return ""
        of = spread(times_ns[by])
        return f"{of['median']:.2f} ({of['low']:.2f}..{of['high']:.2f})"

    ratio = ""
    if "numba" in times_ns:
        ratio = f"{statistics.median(a / b for a, b in zip(times_ns['torch'], times_ns['numba'], strict=True)):.1f}"
    mib = row["numel"] * FLOAT_BYTES / 2**20
    return [row["codec"], f"{mib:g}", row["operation"], cell("torch"), cell("numba"), ratio, cell("copy")]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--megabytes", type=positive_numbers, default=[4.0], metavar="MB,...", help="sizes of a slice, MiB of fp32 (4)")
    add("--rounds", type=positive_int, default=20, help="turns that each one takes (%(default)s)")
    add_results(parser)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the file that `--json` asks for."""
    args = parse_args()
    torch.set_num_threads(1)
    console = Console()
    config = record.configuration(args, torch=torch.__version__, numba=_numba_version())
    record.show_configuration(config)
    rows = []
    for megabytes in args.megabytes:
        numel = max(int(megabytes * 2**20 / FLOAT_BYTES) // 4096, 1) * 4096
        for name in CODECS:
            rows += measure(name, numel, args.rounds)
    console.print("\nNanoseconds an element, median and quartiles")
    headings = ["code", "MiB", "operation", "torch", "numba", "torch/numba", "copy of as many bytes"]
    print_table(console, headings, map(_cells, rows), left=["operation"])
    record.write({"configuration": config, "rows": rows}, args.json)


def _numba_version() -> str | None:
    if not compiled():
        return None
    import numba

    return str(numba.__version__)


if __name__ == "__main__":
    main()
