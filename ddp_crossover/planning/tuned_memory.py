"""What earlier runs of the same model on the same world have found: rank 0 reads and writes it for all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch.nn import Parameter

from ddp_crossover.collectives.agreement import all_gather_json
from ddp_crossover.collectives.link import Link
from ddp_crossover.log import say
from ddp_crossover.options import Options
from ddp_crossover.planning.trials import Candidate
from ddp_crossover.planning.tuned_file import TunedFileError, describe_model, load_tuned, save_tuned
from ddp_crossover.planning.tuner import TuningResult


class TunedMemory:
    """The entry of one model in the user's ``tuned_file``, if there is one.

    Args:
        named: names and parameters that DDP manages.
        options: the user's options.
        link: link between the ranks.
        backend: backend of the process group, such as ``"gloo"``.

    Attributes:
        known: the best candidate of an earlier run; None before :meth:`load`, or if there is none.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], options: Options, link: Link, backend: str) -> None:
        self.known: Candidate | None = None
        self._path = options.tuned_file
        self._link = link
        self._device = named[0][1].device
        self._key, self._model = describe_model(
            named,
            world_size=link.world_size,
            backend=backend,
            device_type=self._device.type,
            options=options.of_the_plan(),
        )

    def load(self) -> None:
        """Read the file on rank 0, for all ranks. A collective if there is a file.

        Raises:
            TunedFileError: on every rank, if rank 0 cannot use the file.
        """
        if self._path is None:
            return
        mine: dict[str, Any] = {}
        if self._link.rank == 0:
            try:
                if (best := load_tuned(self._path, self._key)) is not None:
                    mine["found"] = asdict(best)
            except (TunedFileError, OSError) as error:
                mine["error"] = str(error)
        of_rank_0 = all_gather_json(mine, self._link.process_group, self._device)[0]
        if "error" in of_rank_0:
            raise TunedFileError(of_rank_0["error"])
        self.known = Candidate(**of_rank_0["found"]) if "found" in of_rank_0 else None

    def save(self, result: TuningResult) -> None:
        """Save a result on rank 0. Failures are only logged: they cost the next run its trials and this run nothing."""
        if self._path is None or self._link.rank != 0:
            return
        try:
            save_tuned(self._path, self._key, self._model, result)
        except (TunedFileError, OSError) as error:
            say(f"the result of tuning could not be saved to tuned_file: {error}", logging.WARNING)
