"""A model's files come from the hub: those that are needed, of one commit, and from the cache without a connection."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_transformers
from hub_server import COMMIT, Hub

from bigmodel.errors import CheckpointError
from bigmodel.integrations.transformers.hub import resolve

# The hub's client reads its settings when it is imported, hence a process of its own for each setting.
PROGRAM = """
import json, sys, time
time.sleep = lambda seconds: None  # between the client's attempts to reach a hub that is not there
from bigmodel.errors import BigModelError
from bigmodel.integrations.transformers import from_pretrained
from bigmodel.integrations.transformers.hub import resolve
results = []
for arguments in json.loads(sys.argv[1]):
    try:
        if arguments.pop("load", False):
            model = from_pretrained(arguments["name"], device_map={"": "disk"})
            results.append(["model", model.name_or_path, float(model.model.norm.weight.sum())])
        else:
            results.append(["folder", str(resolve(arguments.pop("name"), **arguments))])
    except BigModelError as error:
        results.append([type(error).__name__, str(error)])
print(json.dumps(results))
"""


def variables(home: Path, endpoint: str) -> dict[str, str]:
    """The environment of a process that knows this hub and this cache."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return own | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def resolved(home: Path, calls: list[dict], endpoint: str, **environment: str) -> list[list]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(calls)],
        env=variables(home, endpoint) | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture
def hub(checkpoint_folder) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in checkpoint_folder("llama").iterdir()}
    others = {
        "pytorch_model.bin": b"not this",
        "onnx/model.onnx": b"nor this",
        "README.md": b"nor this",
        "modeling_special.py": b"SPECIAL = 1",
    }
    single = {"config.json": files["config.json"], "pytorch_model.bin": b"weights"}
    broken = {"config.json": files["config.json"], "model.safetensors.index.json": b"{}"}
    holes = {name: data for name, data in files.items() if not name.startswith("model-00002")}
    repositories = {
        "owner/llama": files | others,
        "owner/single": single,
        "owner/empty": {"config.json": b"{}"},
        "owner/nothing": {"README.md": b""},
        "owner/broken": broken,
        "owner/holes": holes,
        "owner/gated": single,
        "owner/gguf": {"README.md": b"", "tiny.gguf": b"a file"},
        "owner/ggufs": {"config.json": files["config.json"], "q4.gguf": b"one file", "deep/q8.gguf": b"another"},
    }
    with Hub(repositories, gated=frozenset({"owner/gated"})) as running:
        yield running


def test_only_the_configuration_and_one_format_of_weights_are_fetched_and_then_found_offline(tmp_path, hub, checkpoint_folder):
    ((kind, folder),) = resolved(tmp_path, [{"name": "owner/llama"}], hub.endpoint)
    assert kind == "folder"
    assert Path(folder).name == COMMIT
    wanted = {file.name for file in checkpoint_folder("llama").iterdir()}
    assert {file.name for file in Path(folder).iterdir()} == wanted
    assert sorted(hub.fetched) == sorted(wanted)
    assert all((Path(folder) / name).read_bytes() == (checkpoint_folder("llama") / name).read_bytes() for name in wanted)

    calls = [{"name": "owner/llama", "local_files_only": True}, {"name": "owner/llama"}, {"name": "owner/single"}]
    *cached, (kind, message) = resolved(tmp_path, calls, "http://127.0.0.1:9")
    assert cached == [["folder", folder]] * 2
    assert kind == "CheckpointNotFoundError"
    assert "cannot be reached" in message
    ((_, name, total),) = resolved(tmp_path, [{"name": "owner/llama", "load": True}], hub.endpoint, HF_HUB_OFFLINE="1")
    assert name == "owner/llama"
    assert total == float(tiny_transformers.reference(checkpoint_folder("llama"), "llama").model.norm.weight.sum())
    assert sorted(hub.fetched) == sorted(wanted)


def test_other_formats_revisions_and_code(tmp_path, hub):
    calls = [
        {"name": "owner/single"},
        {"name": "owner/llama", "revision": COMMIT},
        {"name": "owner/llama", "trust_remote_code": True},
    ]
    (_, single), (_, at_commit), (_, with_code) = resolved(tmp_path, calls, hub.endpoint)
    assert {file.name for file in Path(single).iterdir()} == {"config.json", "pytorch_model.bin"}
    assert at_commit == with_code
    assert (Path(with_code) / "modeling_special.py").is_file()


def test_a_gguf_file_is_fetched_where_there_is_nothing_else_or_it_is_named(tmp_path, hub):
    calls = [
        {"name": "owner/gguf"},
        {"name": "hf://owner/ggufs/deep/q8.gguf"},
        {"name": "owner/ggufs@main"},
        {"name": "hf://owner/llama/onnx"},
    ]
    (_, only), (_, named), several, inside = resolved(tmp_path, calls, hub.endpoint)
    assert Path(only).name == "tiny.gguf"
    assert Path(only).read_bytes() == b"a file"
    assert Path(named).read_bytes() == b"another"
    assert several[0] == "CheckpointError"
    assert "deep/q8.gguf, q4.gguf. Name the one that is meant: 'hf://owner/ggufs@main/deep/q8.gguf'" in several[1]
    assert inside[0] == "CheckpointError"
    assert "'owner/llama'" in inside[1]
    before = list(hub.fetched)
    cached = resolved(tmp_path, calls[:2], "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert cached == [["folder", only], ["folder", named]]
    assert resolved(tmp_path, [calls[0] | {"local_files_only": True}], hub.endpoint) == [["folder", only]]
    assert hub.fetched == before


def test_what_cannot_be_fetched_is_explained(tmp_path, hub):
    expected = [
        ({"name": "owner/absent"}, "CheckpointNotFoundError", "'owner/absent' is neither a folder nor a model on the hub"),
        ({"name": "./no/such/folder"}, "CheckpointNotFoundError", "'./no/such/folder' is neither a folder nor the id of a model"),
        ({"name": "owner/llama", "revision": "v9"}, "CheckpointNotFoundError", "no branch, tag or commit 'v9'"),
        ({"name": "owner/gated"}, "CheckpointError", "'owner/gated' is gated"),
        ({"name": "owner/empty"}, "CheckpointNotFoundError", "'owner/empty' has a configuration but no weights"),
        ({"name": "owner/nothing"}, "CheckpointNotFoundError", "config.json"),
        ({"name": "owner/broken"}, "CheckpointError", "not an index of shards"),
        ({"name": "owner/holes"}, "CheckpointNotFoundError", "model-00002"),
        ({"name": "owner/llama", "local_files_only": True}, "CheckpointNotFoundError", "not in its cache"),
    ]
    results = resolved(tmp_path, [dict(call) for call, _, _ in expected], hub.endpoint)
    for (call, kind, text), (found_kind, message) in zip(expected, results, strict=True):
        assert (found_kind, text in message) == (kind, True), f"{call}: {found_kind}: {message}"


def test_a_file_is_not_a_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(file)


def test_ctrl_c_while_shards_come_ends_at_once(tmp_path, hub):
    program = (
        "import sys\n"
        "from bigmodel.integrations.transformers.hub import resolve\n"
        "try: resolve('owner/llama')\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)\n"
    )
    reached, release = threading.Event(), threading.Event()

    def silent(file: str) -> None:
        if file.endswith(".safetensors"):
            reached.set()
            release.wait()

    hub.before_body = silent
    run = subprocess.Popen([sys.executable, "-c", program], env=variables(tmp_path, hub.endpoint), stdout=subprocess.PIPE, text=True)
    try:
        assert reached.wait(200)
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=5)  # the hub stays silent; its client gives up after 10 s
        assert out == "interrupted\n"
        assert run.returncode == 0
    finally:
        release.set()
        run.kill()
        run.communicate()
