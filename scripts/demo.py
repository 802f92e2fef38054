"""Shows what DeAR gains on a slow network, on this machine and without root: plain DDP against DeAR, on real images.

    ./scripts/demo.sh             # in a checkout: makes the environment, then runs the next line
    ddp-crossover demo            # a first picture in a minute, the end in two
    ddp-crossover demo --full     # five minutes: DeAR tries group sizes, as it does by default, and rounds are longer

Two processes on the CPU train the same model from the same seed, over a link that the kernel slows down until
communication takes about as long as compute. Ends with a table, one sentence on whether it pays, and a picture.
Exits non-zero if one bit of the trained models differs, or if the link is not as slow as it was asked to be.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from bench_kit.options import add_results, make_parser, positive_int

MODEL = "mobilenet_v2"
STARTED_VARIABLE = "DDP_CROSSOVER_DEMO_STARTED"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = make_parser(__doc__, prog="ddp-crossover demo")
    add = parser.add_argument
    # Few parameters for its compute: what two cores spend on sending hides little of what is shown.
    add("--model", default=MODEL, help="a torchvision classifier (%(default)s)")
    add("--image-size", type=positive_int, default=64, metavar="PIXELS", help="(%(default)s)")
    add("--batch-size", type=positive_int, metavar="N", help="images per process (so that a step takes some 0.2 s)")
    add("--rounds", type=positive_int, metavar="N", help="turns of each arm (3 to 8, as many as there is time for)")
    add("--steps", type=positive_int, default=3, metavar="N", help="steps of a turn (%(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help="five minutes instead of one and a half")
    length.add_argument("--quick", action="store_true", help="to try the demo itself: the figures mean little")
    add("--picture", type=Path, default=Path("demo.png"), metavar="FILE", help="PNG (%(default)s)")
    add_results(parser)
    args = parser.parse_args(arguments)
    if args.model != MODEL:
        import torchvision  # takes a second, so only where it is needed this early

        if args.model not in torchvision.models.list_models(module=torchvision.models):
            parser.error(f"--model {args.model} is none of torchvision's classifiers, such as {MODEL}")
    if os.environ.get("WORLD_SIZE", "2") != "2":
        parser.error("it starts its two processes itself: leave torchrun out")
    return args


def start_ranks() -> None:
    """Become torchrun, which starts this script again as two ranks."""
    # One thread a process: they share this machine, and sums are taken in the same order in every run.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[STARTED_VARIABLE] = str(time.time())
    print("Starting two processes, which takes some seconds.", flush=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    os.execv(sys.executable, [sys.executable, *torchrun, __file__, *sys.argv[1:]])


def main() -> int:
    """Start the ranks, or be one of them."""
    args = parse_args()
    if "WORLD_SIZE" not in os.environ:
        start_ranks()
    from demo_parts import conduct  # takes seconds, which whoever starts the ranks need not wait for

    return conduct.conduct(args, float(os.environ.get(STARTED_VARIABLE, time.time())))


if __name__ == "__main__":
    sys.exit(main())
