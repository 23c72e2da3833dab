"""What the fixtures of tests/conftest.py promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]


def test_there_is_no_accelerator_until_the_test_asks(accelerators) -> None:
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) is None
    assert torch.accelerator.device_count() == 0
    assert not torch.ones(1).is_pinned()
    with pytest.raises(RuntimeError, match="none is available"):
        torch.ones(1).pin_memory()
    with pytest.raises(RuntimeError, match="0 simulated devices"):
        torch.ones(1, device="sim:0")
    torch.ones(1, requires_grad=True).sum().backward()

    assert accelerators(2, memory=["1MiB", "2MiB"]) == [torch.device("sim:0"), torch.device("sim:1")]
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    assert [torch.accelerator.get_memory_info(index)[1] for index in range(2)] == [1 << 20, 2 << 20]
    assert torch.ones(1).pin_memory().is_pinned()


def test_called_again_it_replaces_the_devices(accelerators) -> None:
    accelerators(1, memory="1MiB")
    assert len(accelerators(3, memory=2 << 20, h2d_gbps=1.5)) == 3
    assert torch.accelerator.get_memory_info(2)[1] == 2 << 20
    assert torch.sim.settings()["h2d_gbps"] == 1.5


def test_wrong_arguments_are_named(accelerators) -> None:
    with pytest.raises(TypeError, match="h2d_speed"):
        accelerators(1, h2d_speed=1.0)
    with pytest.raises(ValueError, match="9 simulated devices"):
        accelerators(9)
    with pytest.raises(ValueError, match="2 simulated devices, but 1 capacities"):
        accelerators(2, memory=["1MiB"])
    with pytest.raises(ValueError, match="'lots' is not a size"):
        accelerators(1, memory="lots")
    assert torch.accelerator.device_count() == 0


def test_execution_device(execution_device: torch.device) -> None:
    assert (torch.ones(3, device=execution_device) * 2).cpu().tolist() == [2, 2, 2]
    assert torch.accelerator.device_count() == (0 if execution_device.type == "cpu" else 1)


def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, source: str, *options: str) -> pytest.RunResult:
    """Runs a test file in a process of its own, with this project's fixtures."""
    tests = Path(__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", str(tests))
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess("-p", "conftest", "-p", "no:cacheprovider", *options)


def test_leaks_and_hazards_fail_the_test_and_end_with_it(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(
        pytester,
        monkeypatch,
        """
        import gc
        import torch
        kept = []

        def test_leak(accelerators):
            accelerators(2, memory="1MiB")
            kept.append(torch.ones(1000, device="sim:1"))

        def test_leak_allowed(accelerators):
            assert accelerators(1, memory="1MiB", check_leaks=False)
            assert torch.sim.memory_allocated(0) == 0
            kept.append(torch.ones(1000, device="sim:0"))

        def test_hazard_swallowed(accelerators):
            (device,) = accelerators(1)
            side = torch.sim.Stream(0)
            with side:
                copy = torch.ones(1000).pin_memory().to(device, non_blocking=True)
            try:
                copy + 1
            except RuntimeError:
                pass

        def test_failing(accelerators):
            accelerators(2, poison=False, sanitize=False, h2d_gbps=1.0)
            torch.accelerator.set_device_index(1)
            torch.accelerator.set_stream(torch.sim.Stream(1))
            kept_by_the_traceback = torch.ones(1000, device="sim:1")
            assert False

        def test_nothing_is_left_over(accelerators):
            accelerators(2)
            settings = torch.sim.settings()
            assert settings["poison"] and settings["sanitize"] and settings["h2d_gbps"] == 0
            assert torch.accelerator.current_device_index() == 0
            assert torch.accelerator.current_stream(1) == torch.sim.default_stream(1)
            assert torch.sim.memory_allocated(1) == 0 == torch.sim.max_memory_allocated(1)
            assert torch.sim.take_hazards() == []
            assert torch.sim.link_stats(0)["h2d"]["bytes"] == 0
            kept.clear()
            gc.collect()
            assert torch.sim.memory_allocated(0) == 0 == torch.sim.memory_allocated(1)

        def test_cycles_are_no_leaks(accelerators):
            accelerators(1)
            cycle = [torch.ones(1000, device="sim:0")]
            cycle.append(cycle)
        """,
    )
    result.assert_outcomes(passed=5, failed=1, errors=2)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leak *", "*Bytes still allocated*{1: 4096}*"])
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_hazard_swallowed *", "*no event, stream or device synchronization*"])


SIMPLE = """
    import torch

    def test_on_cpu():
        assert not torch.accelerator.is_available()

    def test_on_accelerator(accelerators):
        accelerators(1)

    def test_on_both(execution_device):
        pass
"""


def test_without_a_compiler_the_tests_that_need_it_fail(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BIGMODEL_SIM_BUILD_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(pytester, monkeypatch, SIMPLE)
    result.assert_outcomes(passed=2, errors=2)  # the CPU's tests pass
    result.stdout.fnmatch_lines(["*no g++ on the PATH*apt-get install g++*"])


def test_a_compiler_that_fails_fails_the_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: no such luck" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("BIGMODEL_SIM_BUILD_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    result = run(pytester, monkeypatch, SIMPLE)
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(["*does not build: g++ failed on *", "*no such luck*"])
    assert not list((tmp_path / "empty").glob("*.so"))


def test_a_run_that_needs_no_accelerator_builds_nothing(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BIGMODEL_SIM_BUILD_DIR", str(tmp_path / "empty"))
    run(pytester, monkeypatch, SIMPLE, "-k", "cpu").assert_outcomes(passed=2, deselected=2)
    assert not (tmp_path / "empty").exists()
