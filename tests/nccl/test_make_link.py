"""The link is chosen by what a backend is, and not by what it is registered as."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_crossover.comm import all_reduce
from ddp_crossover.comm.all_reduce import family_of
from ddp_crossover.nccl import make_link
from equivalence import Case, compare_arms
from models import DeepNet

MINUTE = timedelta(minutes=1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _backend(name: str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(name=lambda: name, **more)


def _group_of(backend: SimpleNamespace, registered_as: str) -> mock._patch_dict:
    """A context in which each group has this backend."""
    return mock.patch.multiple(all_reduce, backend_of=lambda *of: backend, backend_for=lambda *of: registered_as)


@pytest.mark.parametrize("name", ["nccl", "nccl2", "renamed"])
def test_all_backends_on_nccl_get_its_link(name: str) -> None:
    """New groups are of the user's kind."""
    with (
        _group_of(_backend("nccl2" if name == "nccl2" else "nccl"), name),
        mock.patch.object(make_link, "backend_for", lambda *of: name),
        mock.patch.object(make_link, "NcclLink") as made,
        mock.patch.object(make_link, "all_gather_json", lambda value, *of: [value]),
        mock.patch.object(make_link, "new_group") as new_group,
        mock.patch.object(dist, "get_process_group_ranks", lambda group: [0, 1]),
        mock.patch.object(make_link, "given_up", lambda ranks: []),
        mock.patch.object(make_link, "destroy", lambda names: None),
    ):
        link = make_link.make_link(mock.Mock(spec=dist.ProcessGroup), CUDA, MINUTE)
    assert link is made.return_value
    assert [call.kwargs["backend"] for call in new_group.call_args_list] == [name, name]


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        (_backend("nccl"), "nccl"),
        (_backend("nccl2"), "nccl"),
        (_backend("nccl-lazy"), "nccl"),
        (_backend("nccl", get_comm=lambda: None), "nccl"),
        (_backend("ncclx", get_comm=lambda: None), "nccl"),
        (_backend("gloo"), "gloo"),
        (_backend("gloo", get_comm=lambda: None), "gloo of torchcomms, by TORCH_DISTRIBUTED_USE_TORCHCOMMS"),
        (_backend("rcclx", get_comm=lambda: None), "rcclx"),
        (_backend("mpi"), "mpi"),
    ],
)
def test_what_a_backend_is(backend: SimpleNamespace, family: str) -> None:
    with _group_of(backend, "of a script"):
        assert family_of(mock.Mock(), CPU) == family


def test_a_group_without_a_backend_for_the_device_is_what_it_is_registered_as() -> None:
    with (
        mock.patch.object(all_reduce, "backend_for", lambda *of: "cpu:gloo"),
        mock.patch.object(all_reduce, "backend_of", mock.Mock(side_effect=RuntimeError("no backend for cuda"))),
    ):
        assert family_of(mock.Mock(), CUDA) == "cpu:gloo"


@pytest.mark.parametrize("backend", [_backend("mpi"), _backend("gloo", get_comm=lambda: None)])
def test_other_backends_are_refused(backend: SimpleNamespace) -> None:
    with (
        _group_of(backend, "gloo"),
        mock.patch.object(make_link, "backend_for", lambda *of: "gloo"),
        pytest.raises(ValueError, match=r"('mpi'|TORCH_DISTRIBUTED_USE_TORCHCOMMS).*call init_process_group"),
    ):
        make_link.make_link(mock.Mock(spec=dist.ProcessGroup), CUDA, MINUTE)


def _over_a_renamed_gloo() -> None:
    def gloo(options: Any, backend_options: Any) -> Any:
        return distributed_c10d._create_gloo_process_group(options, backend_options)

    if not hasattr(dist.Backend, "RENAMED"):
        dist.Backend.register_backend("renamed", gloo, extended_api=True, devices=["cpu"])
    compare_arms(Case(model=DeepNet, ddp={"process_group": dist.new_group(backend="renamed")}))


def test_gloo_under_another_name_trains_as_plain_ddp(on_ranks) -> None:
    on_ranks(_over_a_renamed_gloo, 2)
