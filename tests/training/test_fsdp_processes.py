"""Sharded training on two processes against the same training in one: losses, weights, files, resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Processes
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigmodel.errors import CheckpointError, MatchError, TrainingError
from bigmodel.training.accelerator import Accelerator
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.configuration import TorchDynamoPlugin
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.handlers import GradScalerKwargs
from bigmodel.training.plugins.fsdp import FullyShardedDataParallelPlugin
from bigmodel.training.plugins.fsdp_functions import (
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)

pytestmark = pytest.mark.xdist_group("processes")

Sizes = Callable[[int], Processes]
BLOCKS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
SHARDED: dict[str, Any] = {**BLOCKS, "state_dict_type": "SHARDED_STATE_DICT"}
BATCH = 12


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Net(nn.Module):
    """Sizes that two processes cannot halve, a tie, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Job:
    """AdamW with two groups, a schedule, clipping; the mean over processes of the losses is the one process's loss."""

    def __init__(self, settings: dict[str, Any] | None, accumulate: int = 1, **arguments: Any):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
        self.accelerator = Accelerator(
            cpu=True, split_batches=True, gradient_accumulation_steps=accumulate, fsdp_plugin=plugin, **arguments
        )
        self.accumulate = accumulate
        torch.manual_seed(3)
        model: nn.Module = Net()
        plain = [parameter for name, parameter in model.named_parameters() if "norm" in name]
        decayed = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0, "lr": 0.02}], lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 8)
        ids = torch.randint(0, 11, (48, 5), generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(ids), batch_size=BATCH)
        # In this order on purpose: the optimizer follows its model wherever it stands.
        self.optimizer, self.model, self.loader, self.schedule = self.accelerator.prepare(optimizer, model, loader, schedule)
        self.norms: list[float] = []

    def train(self, epochs: int = 2, max_norm: float = 0.5) -> list[float]:
        losses = []
        for _ in range(epochs):
            for (ids,) in self.loader:
                with self.accelerator.accumulate(self.model):
                    logits = self.model(ids[:, :-1])
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)))
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def trained(
    settings: dict[str, Any] | None, accumulate: int = 1, **arguments: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    job = Job(settings, accumulate, **arguments)
    losses = job.train()
    return losses, job.norms, job.weights()


def assert_close(ranks: list[Any], alone: Any, tolerance: float) -> None:
    losses, norms, weights = alone
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank[0]), torch.tensor(losses), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(torch.tensor(rank[1]), torch.tensor(norms), rtol=tolerance, atol=tolerance)
    assert ranks[0][2].keys() == weights.keys()
    assert ranks[0][2]["head.weight"].equal(ranks[0][2]["table.weight"])
    for name, value in weights.items():
        torch.testing.assert_close(ranks[0][2][name], value, rtol=tolerance, atol=tolerance, msg=name)
    assert ranks[1][2] == {}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        BLOCKS,
        {**BLOCKS, "reshard_after_forward": False, "forward_prefetch": True},
        {**BLOCKS, "activation_checkpointing": True},
        {**BLOCKS, "cpu_offload": True},
        {"sharding_strategy": "HYBRID_SHARD"},
        {**BLOCKS, "sharding_strategy": "NO_SHARD"},
        {**BLOCKS, "ignored_modules": r"blocks\.1"},
    ],
    ids=["whole", "blocks", "kept", "recomputed", "offloaded", "hybrid", "copied", "ignored"],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_norms_and_weights_are_those_of_one_process(processes: Sizes, settings: dict[str, Any], accumulate: int) -> None:
    assert_close(processes(2).run(trained, settings, accumulate), trained(None, accumulate), 2e-5)


def test_in_half_precision_they_are_near(processes: Sizes) -> None:
    alone = trained(None, 2)
    ranks = processes(2).run(trained, BLOCKS, 2, mixed_precision="bf16")
    assert_close(ranks, alone, 0.1)
    assert ranks[0][0] != alone[0]


def stopped_and_resumed(folder: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    whole = Job(settings)
    losses = whole.train(3)
    first = Job(settings)
    seen = first.train(1)
    first.accelerator.save_state(folder)
    second = Job(settings)
    second.train(1)  # states that loading has to replace
    second.accelerator.load_state(folder)
    seen += second.train(2)
    return (losses, whole.weights()), (seen, second.weights())


@pytest.mark.parametrize("settings", [BLOCKS, SHARDED, {**BLOCKS, "cpu_offload": True}], ids=["full", "parts", "offloaded"])
def test_going_on_is_exact(processes: Sizes, settings: dict[str, Any], tmp_path: Path) -> None:
    for whole, resumed in processes(2).run(stopped_and_resumed, str(tmp_path / "state"), settings):
        assert resumed[0] == whole[0]
        assert all(resumed[1][name].equal(value) for name, value in whole[1].items())
    names = {entry.name for entry in (tmp_path / "state").iterdir()}
    if settings is SHARDED:
        assert {"pytorch_model_fsdp_0", "optimizer_0"} <= names
        assert not {"model.safetensors", "optimizer.bin"} & names
    else:
        assert {"model.safetensors", "optimizer.bin"} <= names


def saved(settings: dict[str, Any] | None, folder: str) -> dict[str, torch.Tensor]:
    job = Job(settings)
    job.train(1)
    job.accelerator.save_state(folder)
    return job.weights()


def continued(settings: dict[str, Any] | None, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    job = Job(settings)
    job.accelerator.load_state(folder)
    return job.weights(), job.train(1)


@pytest.mark.filterwarnings("ignore:.*saved by .* processes:UserWarning")
def test_jobs_with_another_number_of_processes_go_on(processes: Sizes, tmp_path: Path) -> None:
    full = processes(2).run(saved, BLOCKS, str(tmp_path / "full"))[0]
    weights, losses = continued(None, str(tmp_path / "full"))
    assert all(weights[name].equal(value) for name, value in full.items())
    alone = saved(None, str(tmp_path / "alone"))
    for rank, (weights, again) in enumerate(processes(2).run(continued, SHARDED, str(tmp_path / "alone"))):
        assert rank > 0 or all(weights[name].equal(value) for name, value in alone.items())
        torch.testing.assert_close(torch.tensor(again), torch.tensor(losses), rtol=1e-4, atol=1e-4)
    parts = processes(2).run(saved, SHARDED, str(tmp_path / "parts"))[0]
    for rank, (weights, again) in enumerate(
        processes(3).run(continued, {"state_dict_type": "SHARDED_STATE_DICT"}, str(tmp_path / "parts"))
    ):
        assert rank > 0 or all(weights[name].equal(value) for name, value in parts.items())
        assert len(again) == 4


def exported(folder: str) -> tuple[dict[str, torch.Tensor], str]:
    job = Job(BLOCKS)
    job.train(1)
    job.accelerator.save_model(job.model, folder, max_shard_size=300)
    blocked = Path(folder) / "file"
    if job.accelerator.is_main_process:
        blocked.write_text("in the way")
    job.accelerator.wait_for_everyone()
    with pytest.raises((CheckpointError, TrainingError)) as caught:
        job.accelerator.save_model(job.model, blocked)
    job.accelerator.wait_for_everyone()
    return job.weights(), f"{type(caught.value).__name__}: {caught.value}"


def test_saved_models_load_without_processes(processes: Sizes, tmp_path: Path) -> None:
    ranks = processes(2).run(exported, str(tmp_path))
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    values = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert values.keys() == ranks[0][0].keys() - {"head.weight"}  # tied
    assert all(ranks[0][0][name].equal(value) for name, value in values.items())
    assert ranks[0][1].startswith("CheckpointError")
    assert ranks[1][1].startswith("TrainingError: save_model failed in process 0")


def saved_by_hand(folder: str) -> dict[str, torch.Tensor]:
    job = Job(SHARDED)
    job.train(1)
    plugin = job.accelerator.state.fsdp_plugin
    weights, states = job.weights(), [parameter.full_tensor() for parameter in _momenta(job)]
    save_fsdp_model(plugin, job.accelerator, job.model, folder)
    save_fsdp_optimizer(plugin, job.accelerator, job.optimizer, job.model, folder)
    job.train(1)
    assert not all(now.full_tensor().equal(then) for now, then in zip(_momenta(job), states, strict=True))
    load_fsdp_model(plugin, job.accelerator, job.model, folder)
    load_fsdp_optimizer(plugin, job.accelerator, job.optimizer, job.model, folder)
    now = job.weights()
    assert all(now[name].equal(value) for name, value in weights.items())
    assert all(now.full_tensor().equal(then) for now, then in zip(_momenta(job), states, strict=True))
    save_fsdp_model(plugin, job.accelerator, job.model, folder + "-again", adapter_only=True)  # there are no adapters
    load_fsdp_model(plugin, job.accelerator, job.model, folder + "-again", adapter_only=True)
    now = job.weights()
    assert all(now[name].equal(value) for name, value in weights.items())
    with pytest.raises(TrainingError, match="not the accelerator's own"):
        save_fsdp_model(FullyShardedDataParallelPlugin(), job.accelerator, job.model, folder)
    return weights


def _momenta(job: Job) -> list[Any]:
    return [job.optimizer.state[parameter]["exp_avg"] for parameter in job.model.parameters()]


def test_parts_are_saved_by_hand_and_merged_without_processes(processes: Sizes, tmp_path: Path) -> None:
    weights = processes(2).run(saved_by_hand, str(tmp_path / "parts"))[0]
    merge_fsdp_weights(tmp_path / "parts", tmp_path / "merged", remove_checkpoint_dir=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == weights.keys()
    assert all(merged[name].equal(value) for name, value in weights.items())
    assert not (tmp_path / "parts").exists()
    with pytest.raises(CheckpointError):
        merge_fsdp_weights(tmp_path / "merged", tmp_path / "again")


def llama(rank_settings: dict[str, Any] | None, **arguments: Any) -> tuple[list[float], list[str], list[int]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None if rank_settings is None else FullyShardedDataParallelPlugin(**rank_settings)
    accelerator = Accelerator(cpu=True, split_batches=True, fsdp_plugin=plugin, **arguments)
    torch.manual_seed(2)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.randint(0, 31, (12, 6), generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(ids), batch_size=4))
    losses = []
    for (batch,) in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    units = [name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")]
    model.eval()
    return losses, units, model.generate(ids[:1, :3], max_new_tokens=4, do_sample=False)[0].tolist()


def test_a_transformers_model_by_its_own_classes(processes: Sizes) -> None:
    losses, _, tokens = llama(None)
    for found in processes(2).run(llama, {"auto_wrap_policy": "transformer_based_wrap", "activation_checkpointing": True}):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), rtol=1e-4, atol=1e-5)
        assert found[1] == ["", "model.layers.0", "model.layers.1"]
        assert found[2] == tokens


@pytest.mark.parametrize("regional", [True, False])
def test_compiled_it_learns_the_same(processes: Sizes, regional: bool) -> None:
    alone = trained(None)
    plugin = TorchDynamoPlugin(backend="EAGER", use_regional_compilation=regional)
    assert_close(processes(2).run(trained, BLOCKS, dynamo_plugin=plugin), alone, 2e-5)


def from_main(efficient: bool) -> tuple[list[torch.Tensor], str]:
    rank = dist.get_rank()
    AcceleratorState._reset_state(reset_partial_state=True)
    name = "cpu_ram_efficient_loading" if efficient else "sync_module_states"
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**BLOCKS, **{name: True}))
    torch.manual_seed(5 + rank)
    with torch.device("meta" if efficient and rank else "cpu"):
        model = Net()
    expected = [value.clone() for value in model.state_dict().values()] if rank == 0 else []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = list(accelerator.get_state_dict(model).values())
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)
    assert model.scale.item() == 3
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    accelerator.backward(model(torch.arange(8)).square().mean())
    optimizer.step()
    assert not any(
        torch.equal(parameter.to_local(), old) and old.numel() for parameter, old in zip(model.parameters(), before, strict=True)
    )
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(TrainingError) as caught:
        accelerator.prepare(empty)
    return found, str(caught.value)


@pytest.mark.parametrize("efficient", [True, False])
def test_the_main_processs_weights_are_everybodys(processes: Sizes, efficient: bool) -> None:
    messages = [message for _, message in processes(2).run(from_main, efficient)]
    assert "Net has 10 tensors on meta in the main process" in messages[0]
    assert "failed in process 0" in messages[1]


def largest(settings: dict[str, Any] | None) -> tuple[float, float, float]:
    """Norms of all gradients by two powers, and the largest gradient after cutting: of a model with a part that cannot be halved."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=None if settings is None else FullyShardedDataParallelPlugin(**settings))
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    accelerator.backward(model(torch.ones(2, 3)).square().sum())
    by_size = accelerator.clip_grad_norm_(model.parameters(), 100.0, float("inf")).item()
    by_sum = accelerator.clip_grad_norm_(model.parameters(), 1e-3, 1).item()
    after = accelerator.clip_grad_norm_(model.parameters(), 1.0, 1).item()
    return by_size, by_sum, after


@pytest.mark.parametrize("settings", [{}, {"sharding_strategy": "NO_SHARD"}, {"ignored_modules": "1"}])
def test_norms_are_of_the_whole_model_by_any_power(processes: Sizes, settings: dict[str, Any]) -> None:
    expected = largest(None)
    for found in processes(2).run(largest, settings):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def more_of_it(folder: str) -> None:
    job = Job({**BLOCKS, "state_dict_config": None})
    assert job.accelerator.unwrap_model(job.model) is job.model
    assert isinstance(job.model, Net)
    assert not job.accelerator.should_save_model or job.accelerator.is_main_process
    with (
        pytest.raises(TrainingError, match="sharded models need every process in every forward"),
        job.accelerator.join_uneven_inputs([job.model]),
    ):
        pass
    job.accelerator.backward(job.model(torch.arange(4)).sum())
    job.accelerator.clip_grad_value_(job.model.parameters(), 2.0**-9)
    assert (
        max(parameter.grad.to_local().abs().amax().item() for parameter in job.model.parameters() if parameter.grad.to_local().numel())
        <= 2.0**-9
    )
    job.optimizer.zero_grad()
    with pytest.raises(MatchError, match=r"model\.safetensors does not fill model 0"):
        job.accelerator.load_state(folder)
    # An optimizer that is prepared by itself, later, and one whose states are there already.
    other = Net()
    late = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    other(torch.arange(4)).sum().backward()
    late.step()
    before = {name: value.detach().clone() for name, value in other.named_parameters()}
    velocity = [late.state[parameter]["momentum_buffer"].clone() for parameter in other.parameters()]
    other = job.accelerator.prepare(other)
    late = job.accelerator.prepare_optimizer(late)
    assert {id(parameter) for group in late.param_groups for parameter in group["params"]} == set(map(id, other.parameters()))
    for parameter, expected in zip(other.parameters(), velocity, strict=True):
        assert late.state[parameter]["momentum_buffer"].full_tensor().equal(expected)
    assert all(value.full_tensor().equal(before[name]) for name, value in other.named_parameters())


def test_the_rest_of_the_accelerator(processes: Sizes, tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(3, 3))
    accelerator.save_state(str(tmp_path / "other"))
    processes(2).run(more_of_it, str(tmp_path / "other"))


def scaled() -> tuple[list[float], list[bool]]:
    job = Job(BLOCKS, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    losses = job.train(1)
    job.accelerator.loss_scale.update()
    job.accelerator.scaler.update(2.0**40)
    skipped = []
    for _ in range(2):
        job.accelerator.backward(job.model(torch.arange(4)).float().square().mean())
        job.optimizer.step()
        job.optimizer.zero_grad()
        skipped.append(job.accelerator.optimizer_step_was_skipped)
    return losses, skipped


def test_fp16_scales_and_skips_everywhere_or_nowhere(processes: Sizes) -> None:
    alone = Job(None).train(1)
    ranks = processes(2).run(scaled)
    for losses, skipped in ranks:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=0.01, atol=0.01)
        assert skipped[0] is True
    assert ranks[0] == ranks[1]


def test_one_process_without_a_launcher_trains_as_well(tmp_path: Path) -> None:
    alone = trained(None, 2)
    try:
        losses, norms, weights = trained(SHARDED, 2)
        whole, resumed = stopped_and_resumed(str(tmp_path / "state"), SHARDED)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(losses, alone[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(norms, alone[1], rtol=2e-5, atol=2e-5)
    assert weights.keys() == alone[2].keys()
    assert resumed[0] == whole[0]
