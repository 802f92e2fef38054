"""Measure how fast codes of gradients are written and read, beside a copy of the same memory.

    python scripts/bench_codecs.py
    python scripts/bench_codecs.py --numel 1000000 --json codecs.json

One process, one thread, no communication. Each line takes its turn in every round, so that a slow moment of the machine
hits all of them. GB/s count the fp32 elements that go in or come out. Elements are as in a network's gradients: normal,
with scales that differ by orders of magnitude from row to row.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bench_kit import record
from bench_kit.options import add_results, make_parser, positive_int
from ddp_crossover.codecs.block_int8 import BlockInt8
from ddp_crossover.codecs.cast import Cast
from ddp_crossover.codecs.codec import Codec
from ddp_crossover.codecs.selectors import Selector
from ddp_crossover.codecs.top_k import TopKCodec

CODECS: dict[str, Codec] = {
    "int8": BlockInt8(),
    "bf16": Cast(torch.bfloat16),
    **{
        f"top-k {100 * density:g}%, {selector}": TopKCodec(density, selector)
        for density in (0.01, 0.001)
        for selector in (Selector.CHUNKED, Selector.EXACT)
    },
}
ROW = 1024
FP32_BYTES = 4


def jobs(numel: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(numel // ROW, ROW, generator=generator)
    values = (rows * torch.rand(len(rows), 1, generator=generator) ** 4).view(-1)
    residual, left_out, out = values * 0.1, torch.empty_like(values), torch.empty_like(values)
    work: dict[str, Callable[[], object]] = {"memcpy": lambda: out.copy_(values)}
    for name, codec in CODECS.items():
        payload = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8)

        def encode(codec: Codec = codec, payload: torch.Tensor = payload) -> None:
            codec.encode(values, residual, left_out, payload)

        def decode(codec: Codec = codec, payload: torch.Tensor = payload) -> None:
            codec.decode(payload, out)

        encode()
        work |= {f"{name}: encode": encode, f"{name}: decode": decode}
    return work


def measure(numel: int, rounds: int) -> list[dict[str, Any]]:
    """One row for each job: its median speed, the quartiles, and its ratio to the copy of the same round."""
    work = jobs(numel)
    times_s: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, job in work.items():
            begin_s = time.perf_counter()
            job()
            times_s[name].append(time.perf_counter() - begin_s)
    rows = []
    for name, seconds in times_s.items():
        of_copy = [own / copy for own, copy in zip(seconds[1:], times_s["memcpy"][1:], strict=True)]
        speeds = [FP32_BYTES * numel / second * 1e-9 for second in seconds[1:]]  # the first one warms up
        low, middle, high = statistics.quantiles(speeds, n=4)
        codec = CODECS.get(name.partition(":")[0])
        size = FP32_BYTES if codec is None else codec.payload_bytes(numel) / numel
        rows.append(
            {
                "what": name,
                "gb_per_s": middle,
                "quartiles": [low, high],
                "copies": statistics.median(of_copy),
                "bytes_per_element": size,
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The table."""
    table = Table(box=box.SIMPLE)
    for column in ("", "GB/s", "quartiles", "times a memcpy", "bytes an element"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(
            row["what"],
            f"{row['gb_per_s']:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{row['copies']:.1f}",
            f"{row['bytes_per_element']:.3g}",
        )
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--numel", type=positive_int, default=4 * 2**20, help="elements (%(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=15, help="turns of each line (%(default)s)")
    add_results(parser)
    args = parser.parse_args()
    if args.numel % ROW or args.rounds < 2:
        parser.error(f"--numel must be a multiple of {ROW}, and --rounds 2 or more")
    torch.set_num_threads(1)
    configuration = record.configuration(args, torch=torch.__version__, threads=1)
    record.show_configuration(configuration)
    rows = measure(args.numel, args.rounds)
    print_rows(rows)
    record.write({"configuration": configuration, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
