"""The link is chosen by what a backend is, and not by its name."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_crossover.collectives import make_link

MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "nccl-lazy"])
def test_all_backends_on_nccl_get_its_link(name: str) -> None:
    """New groups are of the user's kind."""
    with (
        mock.patch.object(make_link, "backend_for", lambda *of: name),
        mock.patch.object(make_link, "NcclLink") as made,
        mock.patch.object(make_link, "all_gather_json", lambda value, *of: [value]),
        mock.patch.object(make_link, "new_group") as new_group,
        mock.patch.object(dist, "get_process_group_ranks", lambda group: [0, 1]),
        mock.patch.object(make_link, "given_up", lambda ranks: []),
        mock.patch.object(make_link, "destroy", lambda names: None),
    ):
        link = make_link.make_link(mock.Mock(spec=dist.ProcessGroup), torch.device("cuda"), MINUTE)
    assert link is made.return_value
    assert [call.kwargs["backend"] for call in new_group.call_args_list] == [name, name]


def test_other_backends_are_refused() -> None:
    with (
        mock.patch.object(make_link, "backend_for", lambda *of: "mpi"),
        pytest.raises(ValueError, match=r"'mpi'.*call init_process_group"),
    ):
        make_link.make_link(mock.Mock(spec=dist.ProcessGroup), torch.device("cuda"), MINUTE)
