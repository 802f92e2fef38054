"""The README is short: its lines, its sentences, and one ratio in each cell of its tables."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).resolve().parent.parent / "README.md").read_text()
WITHOUT_CODE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
MOST_WORDS = 25


def _sentences(text: str) -> list[str]:
    """Sentences of paragraphs and list items; of links only what is shown."""
    lines = re.sub(r"\]\([^)]*\)", "]", text).splitlines()
    prose = [line for line in lines if not line.startswith(("|", "#"))]
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", "\n".join(prose))
    return [sentence for each in paragraphs for sentence in re.split(r"(?<=[.!?])[*)]*\s", each.strip()) if sentence]


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 130


def test_no_sentence_is_long() -> None:
    sentences = _sentences(WITHOUT_CODE)
    assert len(sentences) > 30
    assert [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS] == []


def test_a_long_sentence_would_be_found() -> None:
    long = "word " * MOST_WORDS
    found = _sentences(f"Short. In (a) [link of two](x y z).\n- {long}end. Short")
    assert [len(each.split()) for each in found] == [1, 5, MOST_WORDS + 2, 1]  # with the mark of its list


def test_no_cell_has_two_ratios() -> None:
    cells = [cell for line in WITHOUT_CODE.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert len(cells) > 50
    assert [cell for cell in cells if len(re.findall(r"\d%", cell)) > 1] == []
