"""Compare what the doctor predicts with what is then measured, on links of several speeds.

    sudo python scripts/bench_doctor.py --json doctor.json

For each link and model, on two hosts of the lab: the doctor examines a training script; then the script runs in turns,
as it is and under python -m ddp_crossover run. The gain is how much faster the median step is. Takes ten minutes.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench_doctor_parts.train import MODELS
from bench_kit.launch import CaseFailed, rank_environment
from lab import Lab, LabError

SCRIPT = Path(__file__).parent / "bench_doctor_parts" / "train.py"
RATES = ("250mbit", "500mbit", "1gbit", "2gbit")
TIMEOUT_S = 600.0
TUNING_STEPS = 75  # the tuner's own limit is 60
PLAIN_STEPS = 30


def main() -> int:
    """Measure all cases; 2 if the lab cannot be built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=RATES, help="link speeds. Default: 250 Mb/s to 2 Gb/s")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=1, help="turns of each arm. Default: 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    args = parser.parse_args()
    cases = []
    for rate in args.rates:
        for model in args.models:
            try:
                with Lab(hosts=2, rate=rate) as lab:
                    case = measure(lab, model, args.rounds)
            except LabError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            cases.append({"rate": rate, "model": model, **case})
            print_case(cases[-1])
            if args.json:
                args.json.write_text(json.dumps(cases, indent=1) + "\n")
    print_table(cases)
    return 0


def measure(lab: Lab, model: str, rounds: int) -> dict[str, Any]:
    """Ask the doctor, then run the script in turns."""
    script = [str(SCRIPT), "--model", model]
    report = json.loads(_output(lab, ["-m", "ddp_crossover", "doctor", "--json", *script], begins="{"))
    steps_s: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in range(rounds):
        steps_s["plain"] += json.loads(_output(lab, [*script, "--steps", str(PLAIN_STEPS)], begins="["))
        run = ["-m", "ddp_crossover", "run", *script, "--steps", str(TUNING_STEPS)]
        steps_s["ours"] += json.loads(_output(lab, run, begins="["))
    medians_s = {arm: statistics.median(seconds) for arm, seconds in steps_s.items()}
    return {
        "predicted_gain": report["prediction"]["gain"],
        "measured_gain": medians_s["plain"] / medians_s["ours"] - 1,
        "medians_s": medians_s,
        "quartiles_s": {arm: statistics.quantiles(seconds, n=4)[::2] for arm, seconds in steps_s.items()},
        "report": report,
    }


def _output(lab: Lab, arguments: list[str], begins: str) -> str:
    result = lab.run([sys.executable, *arguments], env=rank_environment(), timeout_s=TIMEOUT_S)[0]
    start = f"\n{result.stdout}".find(f"\n{begins}")
    if start < 0:
        raise CaseFailed(result.stdout)
    return result.stdout[start:]


def print_case(case: dict[str, Any]) -> None:
    """Print one line when a case is over."""
    print(
        f"{case['rate']} {case['model']}: predicted {case['predicted_gain']:+.1%}, measured "
        f"{case['measured_gain']:+.1%}. {case['report']['verdict']}",
        flush=True,
    )


def print_table(cases: list[dict[str, Any]]) -> None:
    """Print all cases."""
    table = Table("link", "model", "plain DDP, ms", "ours, ms", "predicted gain", "measured gain", "off by, points")
    for case in cases:
        times = []
        for arm in ("plain", "ours"):
            low_s, high_s = case["quartiles_s"][arm]
            times.append(f"{case['medians_s'][arm] * 1e3:.0f} ({low_s * 1e3:.0f} to {high_s * 1e3:.0f})")
        off = 100 * (case["predicted_gain"] - case["measured_gain"])
        gains = [f"{case[which] * 100:+.1f}%" for which in ("predicted_gain", "measured_gain")]
        table.add_row(case["rate"], case["model"], *times, *gains, f"{off:+.1f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
