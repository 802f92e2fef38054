"""PyTorch's own tests of DistributedDataParallel, as they are and with dear_hook in every DDP model.

    python scripts/pytorch_ddp_tests.py
    python scripts/pytorch_ddp_tests.py --only control_flow --json tests.json

The tests come with torch (torch.testing._internal.distributed.distributed_test; they need expecttest). Those that
were written for GPUs run on CPUs, over gloo. A test that passes without us must pass with us, unless it is about
something that is refused; see DOCUMENTED. Exit code 1 if one does not.
"""

import sys
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from bench_kit.options import add_results, make_parser
from bench_kit.record import write
from bench_kit.tables import print_table
from pytorch_ddp_tests_parts import runner

# Tests that may fail with us, and why.
_PICKLE = "pickles the model as a whole, which is refused while attached: save state_dict(), or detach() first"
_JOIN = "trains inside of join(), which is refused"
_LOG = "compares DDP's own log or profile, in which the hook shows"
DOCUMENTED = {
    "test_DistributedDataParallelCPU": _PICKLE,
    "test_DistributedDataParallelCPU_grad_is_view": _PICKLE,
    "test_ddp_comm_hook_logging": _LOG,
    "test_ddp_logging_data_cpu": _LOG,
    "test_ddp_profiling_torch_profiler": _LOG,
    "test_ddp_grad_div_uneven_inputs": _JOIN,
    "test_ddp_join_model_equivalence": _JOIN,
    "test_ddp_uneven_input_exception": _JOIN,
    "test_ddp_join_respects_forward_sync_buffers_false": _JOIN,
}


def main() -> int:
    """Run all of them, print what differs, and write what `--json` asks for."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only tests whose name contains this (all)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each test (%(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test (%(default)s)")
    add_results(parser)
    args = parser.parse_args()
    tests = runner.load(args.ranks)
    names = [name for name in runner.names(tests) if args.only in name]
    console = Console()
    rows: list[dict[str, Any]] = []
    for name in track(names, "running", console=console, disable=not console.is_terminal):
        plain = runner.run(tests, name, args.ranks, attach=False, timeout_s=args.timeout)
        ours = runner.run(tests, name, args.ranks, attach=True, timeout_s=args.timeout)
        documented = DOCUMENTED.get(name, "")
        rows.append({"test": name, "plain": plain._asdict(), "attached": ours._asdict(), "documented": documented})
    title = f"torch {torch.__version__}, {args.ranks} ranks, gloo"
    headings = ("test", "plain", "attached", "why")
    cells: list[list[str]] = []
    failed = 0
    for row in rows:
        plain, ours = row["plain"], row["attached"]
        is_new = plain["result"] == "passed" and ours["result"] != "passed"
        failed += is_new and not row["documented"]
        if is_new or plain["result"] != "passed":
            why = f"{row['documented']} {ours['reason']}".strip() if is_new else plain["reason"]
            cells.append([row["test"], plain["result"], ours["result"], why])
    print_table(console, headings, cells, wrapped=headings, title=title, title_justify="left")
    passing = [row for row in rows if row["plain"]["result"] == "passed"]
    same = [row for row in passing if row["attached"]["result"] == "passed"]
    pipelined = sum(row["attached"]["attached"] > 0 for row in same)
    console.print(
        f"{len(rows)} tests: {len(passing)} pass without us, {len(same)} of these with us "
        f"({pipelined} with a model attached), {failed} fail without a documented reason"
    )
    write(rows, args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
