from __future__ import annotations

from pytest_gpumem.quoting import MOST, printable, quoted


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31m\n\0\u202eb\ud800") == r"a\x1b[31m\n\x00\u202eb\ud800"


def test_letters_of_all_languages_stay_as_they_are() -> None:
    assert printable("größe 大 مرحبا") == "größe 大 مرحبا"


def test_a_long_text_loses_its_middle_and_shows_its_length() -> None:
    text = printable("a" * 5000 + "z" * 5000, 100)
    assert len(text) == 100
    assert "9,900 characters" in text
    assert text[0] == "a"
    assert text[-1] == "z"


def test_a_quoted_value_has_a_bounded_length() -> None:
    assert quoted("1 GB\n") == r"'1 GB\n'"
    assert quoted(3.5) == "3.5"
    assert quoted(Rude()) == "<Rude>"
    assert len(quoted("\0" * 10**7)) <= 2 * MOST
    assert len(quoted([0] * 10**5)) <= 2 * MOST
