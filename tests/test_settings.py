"""What users set in the environment, under both names."""

from __future__ import annotations

import pytest

from bigmodel.settings import environment_flag, read_variable, word_as_bool


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BIGMODEL_QUIET", "ACCELERATE_QUIET"):
        monkeypatch.delenv(name, raising=False)


def test_flags_are_read_under_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_flag("QUIET") is False
    assert environment_flag("QUIET", default=True) is True
    monkeypatch.setenv("ACCELERATE_QUIET", "yes")
    assert environment_flag("QUIET") is True
    monkeypatch.setenv("BIGMODEL_QUIET", "0")
    assert environment_flag("QUIET") is False
    monkeypatch.setenv("BIGMODEL_QUIET", "")
    assert environment_flag("QUIET", default=True) is False
    monkeypatch.setenv("BIGMODEL_QUIET", "maybe")
    with pytest.raises(ValueError, match="BIGMODEL_QUIET"):
        environment_flag("QUIET")


def test_our_own_name_counts_before_the_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_variable("QUIET") is None
    assert read_variable("QUIET", "x") == "x"
    monkeypatch.setenv("ACCELERATE_QUIET", "theirs")
    assert read_variable("QUIET", "x") == "theirs"
    monkeypatch.setenv("BIGMODEL_QUIET", "ours")
    assert read_variable("QUIET", "x") == "ours"


@pytest.mark.parametrize(
    ("word", "value"), [("1", True), ("True", True), ("ON", True), ("y", True), ("0", False), ("No", False), ("f", False)]
)
def test_words_that_say_yes_or_no(word: str, value: bool) -> None:
    assert word_as_bool(word) is value


@pytest.mark.parametrize("word", ["", "2", "yep"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="neither yes nor no"):
        word_as_bool(word)
