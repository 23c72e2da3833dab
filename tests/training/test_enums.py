"""What choices of words are as strings."""

from __future__ import annotations

import json
from enum import Enum

import pytest

from bigmodel.state import PartialState
from bigmodel.training.enums import (
    ComputeEnvironment,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
    WordEnum,
)

WITH_THEIR_CLASS = [DistributedType, ComputeEnvironment, SageMakerDistributedType]
AS_WORDS = [DynamoBackend, LoggerType, PrecisionType, RNGType, DDPCommunicationHookType]


class OfPython(str, Enum):
    NO = "NO"


@pytest.mark.parametrize("words", [*WITH_THEIR_CLASS, *AS_WORDS])
def test_they_equal_their_words(words: type[WordEnum]) -> None:
    for member in words:
        assert member == member.value
        assert member.value == member
        assert words(member.value) is member
        assert member.value in words
        assert json.dumps({"is": member}) == json.dumps({"is": member.value})
        assert repr(member) == f"<{words.__name__}.{member.name}: {member.value!r}>"


@pytest.mark.parametrize("words", AS_WORDS)
def test_some_are_printed_as_their_words(words: type[WordEnum]) -> None:
    for member in words:
        assert (str(member), f"{member}") == (member.value, member.value)


@pytest.mark.parametrize("words", WITH_THEIR_CLASS)
def test_others_are_printed_with_their_class(words: type[WordEnum]) -> None:
    for member in words:
        assert str(member) == f"{words.__name__}.{member.name}"
        # Python's versions format them differently.
        assert f"{member}" == (str(member) if f"{OfPython.NO}" == "OfPython.NO" else member.value)


def test_a_state_is_printed_with_them() -> None:
    assert repr(PartialState(cpu=True)).splitlines()[0] == "Distributed environment: DistributedType.NO"
