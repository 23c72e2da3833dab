"""One progress bar in bytes, on the main process, with a callback and a quiet switch."""

import threading

import pytest

from bigmodel.progress import Progress


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("BIGMODEL_QUIET", "ACCELERATE_QUIET", "RANK"):
        monkeypatch.delenv(name, raising=False)


def test_the_bar_counts_bytes(capsys):
    with Progress(4096, "Loading", show=True) as bar:
        bar.advance(1024)
        bar.advance(3072)
    error = capsys.readouterr().err
    assert "Loading" in error
    assert "4.00k/4.00k" in error


def test_no_bar_without_a_terminal_nor_on_other_ranks(capsys, monkeypatch):
    with Progress(10, "Loading") as bar:
        bar.advance(10)
    monkeypatch.setenv("RANK", "1")
    with Progress(10, "Loading", show=True) as bar:
        bar.advance(10)
    assert capsys.readouterr().err == ""


def test_the_quiet_switch_holds_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("BIGMODEL_QUIET", "1")
    with Progress(10, "Loading") as bar:
        bar.advance(10)
    assert capsys.readouterr().err == ""


def test_the_callback_hears_of_every_step_from_any_thread():
    heard = []
    with Progress(100, "Loading", show=False, callback=lambda done, total: heard.append((done, total))) as bar:
        threads = [threading.Thread(target=bar.advance, args=(10,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert heard == [(10 * step, 100) for step in range(1, 11)]
