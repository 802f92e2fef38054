"""Train optimizers of packages: `python -m tests.packages --only timm --modes default shards --json found.json`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "support")]

import torch  # noqa: E402

from .campaign import SECONDS, Result, campaign  # noqa: E402
from .installed import install, missing  # noqa: E402
from .listed import Configuration, read  # noqa: E402
from .ranks import MODES  # noqa: E402
from .report import failures, table, to_json  # noqa: E402


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.packages", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="configurations whose line has one of these in it"
    )
    parser.add_argument("--modes", nargs="+", default=["default", "shards"], choices=MODES, help="(%(default)s)")
    parser.add_argument("--site", metavar="DIR", help="a folder that has the packages (one is made, and removed)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for a configuration (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all verdicts")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 if a configuration is wrong or crashes."""
    args = parse(arguments)
    chosen = [each for each in read().configurations if not args.only or any(text in str(each) for text in args.only)]
    with tempfile.TemporaryDirectory(prefix="packages-") as folder:
        if not args.site:
            needed = missing(list(dict.fromkeys(each.requirement for each in chosen)))
            for requirement, reason in install(needed, Path(folder)).items():
                print(f"{requirement} cannot be installed: {reason}", file=sys.stderr)
        results = run(chosen, args, args.site or folder)
    print(table(results, args.modes))
    print("\n".join(["", *failures(results)]))
    return bool(failures(results))


def run(chosen: Sequence[Configuration], args: argparse.Namespace, site: str) -> list[Result]:
    """Train them, and keep the file up to date."""
    results: list[Result] = []
    started = time.monotonic()

    def on_result(result: Result) -> None:
        results.append(result)
        kinds = ", ".join(f"{mode} {verdict.kind}" for mode, verdict in result.verdicts.items())
        passed = time.monotonic() - started
        print(
            f"{len(results)}/{len(chosen)} {passed:.0f} s  {result.configuration}  {kinds}", file=sys.stderr, flush=True
        )
        if args.json:
            Path(args.json).write_text(json.dumps(written(results), indent=1))

    return campaign(chosen, tuple(args.modes), site=site, seconds=args.seconds, on_result=on_result)


def written(results: Sequence[Result]) -> dict[str, object]:
    """What the file holds."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"date": time.strftime("%Y-%m-%d"), "versions": versions, "results": to_json(results)}


if __name__ == "__main__":
    sys.exit(main())
