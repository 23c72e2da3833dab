"""Loggers and bars of several processes, and what is logged before there are any."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import pytest
import torch.distributed as dist
from processes import Processes

from bigmodel.logging import get_logger
from bigmodel.training.state import PartialState
from bigmodel.utils import tqdm

Sizes = Callable[[int], Processes]


def test_one_process_writes_with_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("bigmodel.test.one", log_level="info")
    try:
        logger.info("seen %d", 3)
        logger.debug("not seen")
        logger.warning_once("once")
        logger.warning_once("once")
        logger.log(logging.ERROR, "at a level", in_order=True)
    finally:
        logging.root.setLevel(logging.WARNING)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] seen 3", "[RANK 0] once", "[RANK 0] at a level"]
    assert caplog.records[0].funcName == "test_one_process_writes_with_the_callers_line"
    assert not PartialState._shared_state  # logging starts no group


def test_before_the_state_is_made_the_launchers_rank_decides(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    get_logger("bigmodel.test.early").warning("not seen")
    get_logger("bigmodel.test.early").warning("seen", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 1] seen"]


def test_the_level_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    try:
        assert get_logger("bigmodel.test.level").isEnabledFor(logging.DEBUG)
    finally:
        logging.root.setLevel(logging.WARNING)
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("bigmodel.test.level", "loud")


def writes() -> tuple[list[str], bool, bool]:
    PartialState(cpu=True)
    logger = get_logger("bigmodel.test.several")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.logger.addHandler(handler)
    logger.warning("main")
    logger.warning("all", main_process_only=False)
    logger.warning("in order", in_order=True, main_process_only=False)
    logger.logger.removeHandler(handler)
    return stream.getvalue().splitlines(), tqdm(range(2)).disable, tqdm(range(2), main_process_only=False).disable


def test_the_main_process_writes_for_all(processes: Sizes) -> None:
    first, second = processes(2).run(writes)
    assert first == (["[RANK 0] main", "[RANK 0] all", "[RANK 0] in order"], False, False)
    assert second == (["[RANK 1] all", "[RANK 1] in order"], True, False)


def order() -> list[str]:
    state = PartialState(cpu=True)
    logger = get_logger("bigmodel.test.order")
    store = dist.distributed_c10d._get_default_store()

    class Appends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            store.set(f"turn{store.add('turns', 1)}", str(state.process_index))

    handler = Appends()
    logger.logger.addHandler(handler)
    logger.warning("one after the other", in_order=True)
    logger.logger.removeHandler(handler)
    state.wait_for_everyone()
    return [store.get(f"turn{turn}").decode() for turn in range(1, state.num_processes + 1)]


def test_processes_write_in_the_order_of_their_ranks(processes: Sizes) -> None:
    assert processes(3).run(order) == [["0", "1", "2"]] * 3
