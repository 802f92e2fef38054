"""Settings of NCCL under which a failed leg would go unnoticed are refused, by name."""

from __future__ import annotations

import pytest

from ddp_crossover.nccl.nccl_settings import refuse_unsafe_settings, why_streams_block


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("NCCL_BLOCKING_WAIT", "true"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
        ("NCCL_ASYNC_ERROR_HANDLING", " 2 "),
    ],
)
def test_an_unsafe_setting_is_refused_by_name(name, value) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value} .*unset it"):
        refuse_unsafe_settings({name: value})


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TORCH_NCCL_BLOCKING_WAIT": "0"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": ""},
    ],
)
def test_others_are_not(environ) -> None:
    refuse_unsafe_settings(environ)


def test_one_queue_for_all_streams_is_said() -> None:
    assert "unset it" in why_streams_block({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert why_streams_block({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) is None
    assert why_streams_block({}) is None
