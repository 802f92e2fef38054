"""One rank of one run: `python -m soak_parts.rank SETTINGS ARM`, with torchrun's environment.

Trains with the package (ARM is `attached`) or without (`plain`), adds a line to a file for each sample, and writes the
digest of its parameters and its optimizer state at the end.
"""

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench_kit.digest import digests
from bench_kit.launch import tell
from bench_kit.on_ranks import TIMEOUT
from soak_parts.attached import Attached
from soak_parts.settings import SoakSettings
from soak_parts.training import Training

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NEWS_EVERY_S = 0.5


class Run:
    """One run on one rank."""

    def __init__(self, settings: SoakSettings, arm: str) -> None:
        self._settings, self._arm, self._rank = settings, arm, dist.get_rank()
        self._training = Training(settings)
        self._attached = Attached(self._training, settings) if arm == "attached" else None
        self._times_s: list[float] = []
        self._checkpoints = 0
        self._next_news_s = 0.0

    def run(self) -> None:
        """Train all steps, with everything that comes between them."""
        settings = self._settings
        for step in range(1, settings.steps + 1):
            start_s = time.perf_counter()
            self._training.step(step)
            self._times_s.append(time.perf_counter() - start_s)
            if step % settings.sample_every == 0:
                self._sample(step, self._training.evaluate())
            if step % settings.checkpoint_every == 0:
                self._checkpoint()
            if self._attached is not None and step % settings.attach_every == 0 and step < settings.steps:
                self._attached.attach_anew()
            self._tell(step)
        final = digests(self._training.state())
        facts = self._attached.close() if self._attached is not None else {}
        settings.result(self._arm, self._rank).write_text(json.dumps({"digest": final, "facts": facts}))

    def _checkpoint(self) -> None:
        self._checkpoints += 1
        if self._checkpoints % 3 == 0:
            self._training.load()
        else:
            self._training.save()

    def _sample(self, step: int, loss: float) -> None:
        """Add a line to the file, rather than to a list: what this process keeps is what it measures."""
        own = _figures_of_this_process() | {"step_s": statistics.median(self._times_s)}
        self._times_s.clear()
        watched = self._settings.watched if self._rank == 0 else {}
        line = {
            "step": step,
            "loss": loss.hex(),
            "figures": {f"rank {self._rank}": own} | {name: _figures_of(pid) for name, pid in watched.items()},
        }
        with self._settings.samples(self._arm, self._rank).open("a") as file:
            print(json.dumps(line), file=file)

    def _tell(self, step: int) -> None:
        if time.monotonic() >= self._next_news_s:
            self._next_news_s = time.monotonic() + NEWS_EVERY_S
            tell(f"step {step} of {self._settings.steps}", step / self._settings.steps)


def _figures_of(pid: int) -> dict[str, float]:
    """What can grow in a process, as the kernel knows it: memory, threads, descriptors."""
    process = Path("/proc", str(pid))
    return {
        "rss_bytes": PAGE_BYTES * int((process / "statm").read_text().split()[1]),
        "threads": len(os.listdir(process / "task")),
        "descriptors": len(os.listdir(process / "fd")),
    }


def _figures_of_this_process() -> dict[str, float]:
    """The same of this process, and how many objects are alive once the garbage is gone."""
    gc.collect()
    objects = gc.get_objects()
    # type(), because isinstance asks an object for its class, and an object may do anything then.
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    counts: dict[str, float] = {"objects": len(objects), "tensors": tensors}
    del objects
    return _figures_of(os.getpid()) | counts


def main() -> None:
    """Run one rank."""
    settings, arm = SoakSettings.read(Path(sys.argv[1])), sys.argv[2]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # the network learns its few batches by heart, and small gradients would be slow
    dist.init_process_group("gloo", timeout=TIMEOUT)
    Run(settings, arm).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
