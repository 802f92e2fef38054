"""An option is spelled in one class; what repeats it is compared with that."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ddp_crossover.addons.codes.wire import CODES
from ddp_crossover.options import CODED_DTYPES, WIRE_DTYPES, GivenOptions, Options

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
NAMES = [field.name for field in fields(Options)]
# Users write what the class turns into an enum.
AS_STRINGS = {"Schedule": "str", "Norms": "str"}


def test_what_users_give_has_the_fields_of_the_class_and_their_types() -> None:
    given = {name: annotation.__forward_arg__ for name, annotation in GivenOptions.__annotations__.items()}
    assert given == {field.name: AS_STRINGS.get(str(field.type), field.type) for field in fields(Options)}


def test_each_option_is_documented_in_the_class_and_in_the_guide() -> None:
    documented = re.findall(r"^        (\w+): ", (Options.__doc__ or "").split("Raises:")[0], re.MULTILINE)
    assert sorted(documented) == sorted(NAMES)
    in_guide = {name for row in re.findall(r"^\| (.+?) \|", GUIDE.read_text(), re.MULTILINE) for name in row.split("`")}
    assert set(NAMES) <= in_guide


def test_each_coded_dtype_has_a_code() -> None:
    assert {str(dtype) for dtype in CODES} == {*CODED_DTYPES} < {*WIRE_DTYPES}  # which load no torch


def test_ranks_agree_on_all_options_but_those_of_a_rank() -> None:
    assert sorted(Options().shared_by_ranks()) == sorted({*NAMES} - {"strict"})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("fusion_mib", "there is no option fusion_mib: did you mean fusion_mb?"),
        ("lr", "there is no option lr: there are"),
    ],
)
def test_an_option_that_does_not_exist_is_named_with_its_likeness(option, message) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        Options.given({option: 1})  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("fusion_mb", "8", "fusion_mb must be a number greater than 0"),
        ("tuned_file", 3, "tuned_file must be a path, got 3"),
        ("strict", "no", "strict must be True or False, got 'no'"),
        ("shard_optimizer", 1, "shard_optimizer must be True or False, got 1"),
    ],
)
def test_a_value_of_another_type_is_refused_in_a_sentence(option, value, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Options(**{option: value})
