"""Variables are read under both prefixes, and are as before where a block or a test ends."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import unittest

import pytest

from bigmodel.errors import TrainingError
from bigmodel.training.environment import (
    check_os_kernel,
    clear_environment,
    convert_dict_to_env_variables,
    get_free_port,
    get_int_from_env,
    is_port_in_use,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)

LOGGER = "bigmodel.utils.environment"


def test_words_as_numbers() -> None:
    assert [str_to_bool("yes"), str_to_bool("OFF")] == [1, 0]
    assert str_to_bool("yes") is not True
    assert str_to_bool("yes", to_bool=True) is True
    with pytest.raises(ValueError, match="perhaps"):
        str_to_bool("perhaps")


def test_the_ecosystems_name_is_an_alias_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_choice_from_env("ACCELERATE_MIXED_PRECISION") == "no"
    assert parse_flag_from_env("ACCELERATE_USE_CPU") is False
    assert parse_flag_from_env("ACCELERATE_USE_CPU", True) is True
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert parse_choice_from_env("BIGMODEL_MIXED_PRECISION") == "fp16"
    monkeypatch.setenv("BIGMODEL_MIXED_PRECISION", "bf16")
    assert parse_choice_from_env("ACCELERATE_MIXED_PRECISION") == "bf16"
    monkeypatch.setenv("BIGMODEL_USE_CPU", "true")
    assert parse_flag_from_env("ACCELERATE_USE_CPU") is True
    monkeypatch.setenv("OTHER", "si")
    assert parse_choice_from_env("OTHER") == "si"
    with pytest.raises(TrainingError, match="OTHER: 'si' is neither"):
        parse_flag_from_env("OTHER")


def test_the_first_variable_with_a_number_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_int_from_env(["ONE", "TWO"], 7) == 7
    monkeypatch.setenv("TWO", "2")
    assert get_int_from_env(["ONE", "TWO"], 7) == 2
    monkeypatch.setenv("ONE", "-1")
    assert get_int_from_env(["ONE", "TWO"], 7) == 2
    monkeypatch.setenv("ONE", "0")
    assert get_int_from_env(["ONE", "TWO"], 7) == 0
    monkeypatch.setenv("ONE", "none")
    with pytest.raises(TrainingError, match="ONE is 'none'"):
        get_int_from_env(["ONE", "TWO"], 7)


def test_lines_for_a_file_of_variables(caplog: pytest.LogCaptureFixture) -> None:
    given = {"ACCELERATE_DEBUG_MODE": "1", "BAD_ENV_NAME": "<mything", "OTHER_ENV": "2", "EMPTY": "", "": "x", "A B": "1", "C": "1;2"}
    with caplog.at_level(logging.WARNING, LOGGER):
        assert convert_dict_to_env_variables(given) == ["ACCELERATE_DEBUG_MODE=1\n", "OTHER_ENV=2\n"]
    assert [record.levelname for record in caplog.records if record.name == LOGGER] == ["WARNING"] * 5
    assert "'BAD_ENV_NAME'='<mything'" in caplog.text


def test_patched_variables_are_as_before_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERE", "old")
    before = dict(os.environ)
    with pytest.raises(KeyError), patch_environment(there="new", count=3, FLAG=True):  # noqa: PT012
        assert [os.environ[name] for name in ("THERE", "COUNT", "FLAG")] == ["new", "3", "True"]
        del os.environ["COUNT"]
        raise KeyError("x")
    assert dict(os.environ) == before


def test_what_a_block_sets_beside_its_patch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BESIDE", raising=False)
    with patch_environment(foo=1):
        os.environ["BESIDE"] = "stays"
    assert os.environ["BESIDE"] == "stays"
    assert "FOO" not in os.environ


def test_a_cleared_environment_is_empty_and_comes_back() -> None:
    os.environ["FOO"] = "bar"
    before = dict(os.environ)
    with pytest.raises(KeyError), clear_environment():  # noqa: PT012
        assert dict(os.environ) == {}
        os.environ["FOO"] = "new_bar"
        os.environ["MORE"] = "1"
        raise KeyError("x")
    assert dict(os.environ) == before


def _pollute() -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
    os.environ["BIGMODEL_USE_CPU"] = "1"
    os.environ["OTHER"] = "kept"
    os.environ.pop("ACCELERATE_THERE", None)


def _ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_M", "ACCELERATE_T", "BIGMODEL_U"))}


def test_a_purged_function_leaves_no_variable_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_THERE", "1")

    @purge_accelerate_environment
    def pollute(answer: int, *, fails: bool = False) -> int:
        """Documented."""
        _pollute()
        if fails:
            raise KeyError(answer)
        return answer

    assert pollute(42) == 42
    assert pollute.__doc__ == "Documented."
    assert _ours() == {"ACCELERATE_THERE": "1"}
    assert os.environ["OTHER"] == "kept"
    with pytest.raises(KeyError):
        pollute(1, fails=True)
    assert _ours() == {"ACCELERATE_THERE": "1"}

    @purge_accelerate_environment
    async def pollute_later() -> str:
        await asyncio.sleep(0)
        _pollute()
        return "done"

    assert asyncio.run(pollute_later()) == "done"
    assert _ours() == {"ACCELERATE_THERE": "1"}


def test_a_purged_class_purges_its_tests_and_those_of_its_subclasses() -> None:
    told = []

    class Base:
        def test_inherited(self) -> None:
            _pollute()

        def __init_subclass__(cls, word: str = "") -> None:
            told.append((cls.__name__, word))

    @purge_accelerate_environment
    class Tests(Base, word="tests"):
        test_data = (1, 2)

        def test_own(self) -> str:
            _pollute()
            return "own"

        @staticmethod
        def test_static() -> None:
            _pollute()

        @classmethod
        def test_of_class(cls) -> str:
            _pollute()
            return cls.__name__

        def helper(self) -> None:
            _pollute()

    class Derived(Tests, word="derived"):
        def test_more(self) -> None:
            _pollute()

    assert told == [("Tests", "tests"), ("Derived", "derived")], "the class's own hook runs as well"
    tests = Derived()
    assert tests.test_own() == "own"
    assert tests.test_of_class() == "Derived"
    for test in (tests.test_inherited, tests.test_static, tests.test_more):
        test()
    assert _ours() == {}
    assert Tests.test_data == (1, 2)
    tests.helper()
    assert _ours() == {"ACCELERATE_MIXED_PRECISION": "fp16", "BIGMODEL_USE_CPU": "1"}, "a helper is no test"


def test_a_purged_unittest_case() -> None:
    @purge_accelerate_environment
    class Case(unittest.TestCase):
        def test_it(self) -> None:
            _pollute()
            assert os.environ["ACCELERATE_MIXED_PRECISION"] == "fp16"

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    assert (result.testsRun, result.failures, result.errors) == (1, [], [])
    assert _ours() == {}


def test_a_port_is_in_use_while_somebody_listens() -> None:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        server.listen()
        port = server.getsockname()[1]
        assert is_port_in_use(port)
        assert is_port_in_use(str(port))
    assert not is_port_in_use(port)
    free = get_free_port()
    assert 0 < free < 65536
    assert not is_port_in_use(free)


@pytest.mark.parametrize(("system", "release", "warned"), [
    ("Linux", "5.4.17-2136.el8", True),
    ("Linux", "4.18", True),
    ("Linux", "5.5.0", False),
    ("Linux", "5.10.0-rc1", False),
    ("Linux", "6.1.0+", False),
    ("Darwin", "5.0.0", False),
])  # fmt: skip
def test_old_linux_kernels_are_warned_of(
    system: str, release: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    with caplog.at_level(logging.WARNING, LOGGER):
        check_os_kernel()
    assert ("5.5.0" in caplog.text) is warned
