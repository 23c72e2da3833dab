"""Processes in a grid: copies, parts and shared sequences give the losses and weights of one process; the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Processes
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from bigmodel import DeepSpeedPlugin
from bigmodel.errors import TrainingError, WrongTypeError
from bigmodel.parallelism_config import ParallelismConfig
from bigmodel.training.accelerator import Accelerator
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.plugins.fsdp import FullyShardedDataParallelPlugin

pytestmark = pytest.mark.xdist_group("processes")

SAMPLES, LENGTH = 16, 4


def trained(sizes: dict[str, int] | None, shards: bool) -> dict[str, Any]:
    """Two epochs of 8 samples a step; every process that shares sequences takes its part of each."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = None if sizes is None else ParallelismConfig(**sizes)
    plugin = FullyShardedDataParallelPlugin() if shards else None
    accelerator = Accelerator(cpu=True, split_batches=True, fsdp_plugin=plugin, parallelism_config=config)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = torch.randint(0, 10, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(ids, torch.arange(SAMPLES)), batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, inner, loader, StepLR(inner, 1, 0.9))
    mesh = accelerator.torch_device_mesh
    parts, part = (1, 0) if mesh is None else (mesh["cp"].size(), mesh["cp"].get_local_rank())
    losses, seen = [], []
    for _ in range(2):
        for tokens, numbers in loader:
            own = tokens.chunk(parts, dim=1)[part]
            loss = nn.functional.cross_entropy(model(own).flatten(0, 1), own.flatten())
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append([accelerator.reduce(loss.detach(), "mean").item(), float(norm)])
            seen.append(accelerator.gather_for_metrics(numbers).tolist())
    weights = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "seen": seen,
        "rate": scheduler.get_last_lr(),
        "weights": {name: value.tolist() for name, value in weights.items()},
        "rows": [parameter.to_local().shape[0] for parameter in model.parameters()][:1] if shards else None,
        "own": numbers.tolist(),
    }


@pytest.mark.parametrize(
    ("ranks", "sizes", "shards", "rows"),
    [
        (2, {"dp_replicate_size": 2}, False, None),
        (2, {"cp_size": 2}, False, None),
        (2, {"dp_shard_size": 2}, True, 5),
        (4, {"dp_replicate_size": 2, "dp_shard_size": 2}, True, 5),
        (4, {"dp_shard_size": 2, "cp_size": 2}, True, 3),
        (4, {"dp_replicate_size": 2, "cp_size": 2}, True, 5),
        (4, {"dp_replicate_size": 2, "cp_size": 2}, False, None),
    ],
)
def test_every_grid_trains_as_one_process(
    processes: Callable[[int], Processes], ranks: int, sizes: dict[str, int], shards: bool, rows: int | None
) -> None:
    alone = trained(None, False)
    outcomes = processes(ranks).run(trained, sizes, shards)
    for outcome in outcomes:
        torch.testing.assert_close(torch.tensor(outcome["losses"]), torch.tensor(alone["losses"]), rtol=1e-4, atol=1e-5)
        assert outcome["seen"] == alone["seen"]  # every sample once, whoever shares it
        assert outcome["rate"] == alone["rate"]
    for name, values in alone["weights"].items():
        torch.testing.assert_close(torch.tensor(outcomes[0]["weights"][name]), torch.tensor(values), rtol=1e-3, atol=1e-4)
    if rows is not None:
        assert outcomes[0]["rows"] == [rows]
    if "cp_size" in sizes:
        assert [outcome["own"] for outcome in outcomes[::2]] == [outcome["own"] for outcome in outcomes[1::2]]


def refusals() -> list[str]:
    cases: list[tuple[dict[str, int], Any]] = [
        ({"tp_size": 2}, {}),
        ({"dp_replicate_size": 4}, {}),
        ({}, {}),
        ({"dp_shard_size": 2}, {}),
        ({"dp_replicate_size": 2}, {"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD")}),
        ({"dp_replicate_size": 2}, {"deepspeed_plugin": DeepSpeedPlugin()}),
    ]
    told = []
    for sizes, arguments in cases:
        with pytest.raises(TrainingError) as refused:
            Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes), **arguments)
        told.append(str(refused.value))
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp")
    assert Accelerator(cpu=True).parallelism_config == ParallelismConfig(cp_size=2)  # settled for the process
    with pytest.raises(TrainingError, match="this process trains with"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
    with pytest.raises(TrainingError, match=r"Cut them in the script.*cp_size"):
        accelerator.maybe_context_parallel(buffers=[])
    return told


def test_what_is_not_done_is_refused_by_name(processes: Callable[[int], Processes]) -> None:
    for told in processes(2).run(refusals):
        for message, expected in zip(
            told,
            [
                "(tp_size=2): Accelerator does not train matrices that processes share (tp_size). Use MegatronLMPlugin",
                "(dp_replicate_size=4) divides 4 processes, and there are 2",
                "(all sizes 1) divides 1 processes, and there are 2",
                "(dp_shard_size=2): a FullyShardedDataParallelPlugin shards",
                "sharding_strategy=NO_SHARD both say which processes have copies",
                "DEEPSPEED divides processes as its own plugin says",
            ],
            strict=True,
        ):
            assert expected in message


def test_sizes() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=5)
    assert (config.tp_size, config.total_size, config.data_parallel_size, config.sharding()) == (1, 30, 6, (2, 15))
    assert (config.dp_replicate_enabled, config.dp_shard_enabled, config.cp_enabled, config.tp_enabled) == (True, True, True, False)
    config.tp_size = 2  # as transformers' Trainer does it
    assert config.total_size == 60
    with pytest.raises(TrainingError, match="dp_shard_size=0"):
        ParallelismConfig(dp_shard_size=0)
    with pytest.raises(WrongTypeError, match=r"ParallelismConfig\(cp_size='2'\): it takes a whole number or None, not a str"):
        ParallelismConfig(cp_size="2")  # type: ignore[arg-type]


def test_one_process_without_a_config() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.parallelism_config is None
    assert accelerator.torch_device_mesh is None
    with accelerator.maybe_context_parallel(buffers=[], buffer_seq_dims=[], no_restore_buffers=set()):
        pass
