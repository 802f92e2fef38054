"""Compare a run of plain DDP with a run of DeAR; fail if one bit of the models differs.

    python scripts/compare_runs.py runs/demo/none runs/demo/dear

Each argument is what train.py --json X.json --save-params X.pt wrote, without the ending.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench_kit.options import add_results, make_parser
from bench_kit.record import write


class Difference(NamedTuple):
    """How two state_dicts differ. `where` names the first tensor that does, or is empty."""

    tensors: int
    largest: float
    where: str


def read_run(stem: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The record and the state_dict of a run."""
    json_path, params_path = stem.with_suffix(".json"), stem.with_suffix(".pt")
    try:
        record: dict[str, Any] = json.loads(json_path.read_text())
        params: dict[str, torch.Tensor] = torch.load(params_path, weights_only=True)
    except FileNotFoundError as error:
        raise SystemExit(
            f"compare_runs.py: error: {error.filename} does not exist; train.py writes it with "
            f"--json {json_path} --save-params {params_path}"
        ) from error
    return record, params


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> Difference:
    """Compare all tensors, parameters and buffers. NaN equals nothing, so it is a difference."""
    if shapes(left) != shapes(right):
        odd = next(iter(shapes(left).items() ^ shapes(right).items()))
        raise SystemExit(f"compare_runs.py: error: not the same model: {odd[0]} is not the same in both")
    largest = {
        name: (tensor.double() - right[name].double()).abs().max()
        for name, tensor in left.items()
        if not torch.equal(tensor, right[name])
    }
    overall = torch.stack(list(largest.values())).max().item() if largest else 0.0
    return Difference(len(left), overall, next(iter(largest), ""))


def shapes(state_dict: dict[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    """Name to shape and dtype."""
    return {name: (tuple(t.shape), t.dtype) for name, t in state_dict.items()}


def epochs_table(left: dict[str, Any], right: dict[str, Any]) -> Table:
    """Loss and accuracy of every epoch."""
    table = Table("epoch", title="Same seed, same data", title_justify="left")
    for heading in ("loss, DDP", "loss, DeAR", "accuracy, DDP", "accuracy, DeAR"):
        table.add_column(heading, justify="right")
    for a, b in zip(left["epochs"], right["epochs"], strict=True):
        table.add_row(
            str(a["epoch"]), f"{a['loss']:.6f}", f"{b['loss']:.6f}",
            f"{a['accuracy']:.2%}", f"{b['accuracy']:.2%}",
        )  # fmt: skip
    return table


def speed_table(left: dict[str, Any], right: dict[str, Any]) -> Table:
    """Throughput and exposed communication: median and range, without the first epoch."""
    table = Table("", title="Speed on this machine", title_justify="left")
    for heading in ("DDP", "DeAR"):
        table.add_column(heading, justify="right")
    runs = (left, right)
    table.add_row("samples/s", *(median_and_range(run, "samples_per_s", 1) for run in runs))
    table.add_row(
        "exposed communication, ms per step",
        *(median_and_range(run, "exposed_s_per_step", 1e3) for run in runs),
    )
    return table


def median_and_range(run: dict[str, Any], key: str, scale: float) -> str:
    """The run's median of a figure, with its range over the epochs that the median is taken from."""
    if run[key] is None:
        return "not measured"
    figures = [epoch[key] * scale for epoch in run["epochs"][1:] or run["epochs"]]
    return f"{run[key] * scale:.1f} ({min(figures):.1f} to {max(figures):.1f})"


def main() -> int:
    """Print the comparison; 0 if the models are bit-identical, and on all ranks, else 1."""
    parser = make_parser(__doc__)
    parser.add_argument("ddp", type=Path, help="the run of plain DDP, such as runs/demo/none")
    parser.add_argument("dear", type=Path, help="the run of DeAR, such as runs/demo/dear")
    add_results(parser)
    args = parser.parse_args()
    (ddp, ddp_params), (dear, dear_params) = read_run(args.ddp), read_run(args.dear)
    if len(ddp["epochs"]) != len(dear["epochs"]):
        raise SystemExit("compare_runs.py: error: the runs differ in their number of epochs")

    found = difference(ddp_params, dear_params)
    ranks_agree = len({*ddp["parameters_sha256"], *dear["parameters_sha256"]}) == 1
    identical = not found.where and ranks_agree

    console = Console()
    console.print(epochs_table(ddp, dear), speed_table(ddp, dear), sep="\n")
    console.print(f"largest absolute difference of parameters and buffers: {found.largest:g}")
    if identical:
        console.print(f"[green]bit-identical[/]: all {found.tensors} tensors, on all ranks")
    elif found.where:
        console.print(f"[red]different[/], first in {found.where}")
    else:
        console.print("[red]different[/]: parameters_sha256 is not the same on all ranks of both runs")
    for reason, times in dear["fallbacks"].items():
        console.print(f"DeAR fell back {times} time(s): {reason}", markup=False)
    result = {
        "identical": identical,
        "largest_difference": found.largest,
        "first_difference": found.where,
        "ddp": ddp,
        "dear": dear,
    }
    write(result, args.json)
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
