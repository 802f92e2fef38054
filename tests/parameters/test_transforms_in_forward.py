"""Forwards that use `torch.func`, `torch.autograd.functional` and forward-mode AD on their own parameters."""

from __future__ import annotations

import pytest

from equivalence import Case, check_case
from transformed_models import TRANSFORMED


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_forward_that_transforms_functions_of_its_parameters_is_exact(on_ranks, name: str) -> None:
    check_case(Case(model=TRANSFORMED[name], steps=12), on_ranks)
