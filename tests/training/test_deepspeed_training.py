"""Training with DeepSpeed on two processes: the losses, steps and files of a loop that one process runs without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes, RanksFailed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigmodel import Accelerator, DeepSpeedPlugin, TrainingError
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.plugins.deepspeed_stand_ins import DummyOptim, DummyScheduler
from bigmodel.utils import GatheredParameters, TorchDynamoPlugin

pytest.importorskip("deepspeed")

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.filterwarnings("ignore")]

Sizes = Callable[[int], Processes]

TOLERANCE = 1e-5
"""Of losses in float32: gradients of two processes are summed in another order."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def fresh() -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()


def loop(
    accelerator: Accelerator, parts: tuple[Any, ...], batches: int | None = None, max_norm: float | None = None, divides: bool = False
) -> list[float]:
    """Mean losses over the processes, and norms of gradients, of a pass over the data. With `divides`, the script divides losses."""
    model, optimizer, loader, scheduler = parts
    seen = []
    for number, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            if divides:
                accelerator.backward(loss / accelerator.gradient_accumulation_steps, scale_wrt_gas=False)
            else:
                accelerator.backward(loss)
            if max_norm is not None and accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                seen.append(float(norm))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        if number + 1 == batches:
            break
    return seen


def prepared(accelerator: Accelerator, batch_size: int) -> tuple[Any, ...]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=batch_size), scheduler)


def alone(steps: int, max_norm: float | None = None, epochs: int = 1) -> list[float]:
    fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    parts = prepared(accelerator, 8)
    # A schedule steps once for each process.
    parts[3].scheduler.gamma = 0.9**2
    return [value for _ in range(epochs) for value in loop(accelerator, parts, max_norm=max_norm)]


def with_deepspeed(steps: int, stage: int, max_norm: float | None, divides: bool = False, **fields: Any) -> list[float]:
    fresh()
    plugin = DeepSpeedPlugin(zero_stage=stage, **fields)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, deepspeed_plugin=plugin)
    parts = prepared(accelerator, 4)
    assert plugin.get_value("train_micro_batch_size_per_gpu") == 4
    assert plugin.get_value("train_batch_size") == 4 * steps * 2
    return [value for _ in range(2) for value in loop(accelerator, parts, max_norm=max_norm, divides=divides)]


@pytest.mark.parametrize(
    ("stage", "steps", "max_norm", "fields"),
    [
        (2, 1, None, {}),
        (2, 4, 0.5, {}),  # the last two of six batches are a step
        (2, 2, 0.5, {"gradient_clipping": 0.5}),
        (2, 2, 0.5, {"divides": True}),
        (2, 2, 0.5, {"offload_optimizer_device": "cpu"}),
        (3, 2, 0.5, {}),
        (1, 2, 0.5, {}),
        (0, 2, 0.5, {}),
    ],
)
def test_losses_and_norms_are_those_of_one_process(
    processes: Sizes, stage: int, steps: int, max_norm: float | None, fields: dict[str, Any]
) -> None:
    expected = alone(steps, max_norm, epochs=2)
    for seen in processes(2).run(with_deepspeed, steps, stage, max_norm, **fields):
        assert seen == pytest.approx(expected, rel=TOLERANCE)


def stopped_and_resumed(folder: str, stage: int) -> tuple[list[float], list[float]]:
    def job() -> tuple[Accelerator, tuple[Any, ...]]:
        fresh()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        return accelerator, prepared(accelerator, 4)

    accelerator, parts = job()
    loop(accelerator, parts, batches=4)
    accelerator.save_state(folder)
    accelerator.free_memory()
    accelerator, parts = job()
    whole = loop(accelerator, parts)
    accelerator.free_memory()
    accelerator, parts = job()
    with torch.no_grad():
        for parameter in parts[0].module.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    return whole, loop(accelerator, parts)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_job_goes_on_from_its_files_to_the_bit(processes: Sizes, stage: int, tmp_path: Path) -> None:
    for whole, resumed in processes(2).run(stopped_and_resumed, str(tmp_path / "state"), stage):
        assert resumed == whole[4:]
    files = {file.name for file in (tmp_path / "state").iterdir()}
    assert "pytorch_model" in files
    assert not {"model.safetensors", "optimizer.bin"} & files  # the engine's checkpoint has both
    assert len(list((tmp_path / "state" / "pytorch_model").glob("*optim_states.pt"))) == 2


def made_by_deepspeed() -> tuple[list[float], list[float], dict[str, Any]]:
    fresh()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": 2},
    }
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    assert accelerator.gradient_accumulation_steps == 2
    model = network()
    optimizer = DummyOptim(model.parameters(), lr=0.1, weight_decay=0.01)
    parts = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=4), DummyScheduler(optimizer, warmup_num_steps=8))
    model, optimizer, loader, scheduler = parts
    seen = []
    rates_seen = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        rates_seen.append(optimizer.param_groups[0]["lr"])
    return seen, rates_seen, accelerator.deepspeed_plugin.deepspeed_config


def test_deepspeed_makes_optimizer_and_scheduler_of_its_config(processes: Sizes) -> None:
    for losses, rates, config in processes(2).run(made_by_deepspeed):
        assert config["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.01}
        # Eight steps of one process are four of two.
        assert config["scheduler"]["params"]["warmup_num_steps"] == 4
        assert config["scheduler"]["params"]["warmup_max_lr"] == 0.1
        assert rates == sorted(rates)
        assert rates[0] < rates[-1] <= 0.1
        assert losses[-1] < losses[0]
        assert config["train_batch_size"] == 16


def weights_for_others(folder: str, gathers: bool) -> Any:
    fresh()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=gathers))
    parts = prepared(accelerator, 4)
    if not gathers:
        with pytest.raises(TrainingError, match=r"zero3_save_16bit_model=True"):
            accelerator.get_state_dict(parts[0])
        with pytest.raises(TrainingError, match=r"zero3_save_16bit_model=True"):
            accelerator.save_model(parts[0], folder)
        return None
    accelerator.save_model(parts[0], folder)
    state = accelerator.get_state_dict(parts[0])
    assert type(accelerator.unwrap_model(parts[0])) is nn.Sequential
    return {name: value.clone() for name, value in state.items()}


def test_a_sharded_model_is_gathered_where_the_plugin_says_so(processes: Sizes, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    processes(2).run(weights_for_others, str(tmp_path / "none"), False)
    main, other = processes(2).run(weights_for_others, str(tmp_path / "weights"), True)
    expected = network().state_dict()
    assert other == {}
    for found in (main, load_file(tmp_path / "weights" / "model.safetensors")):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def gathered() -> list[Any]:
    fresh()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    model, *_ = prepared(accelerator, 4)
    whole = {name: parameter.ds_shape for name, parameter in model.named_parameters()}
    outside = [parameter.numel() for parameter in model.parameters()]
    with GatheredParameters(model.parameters(), modifier_rank=0):
        inside = {name: parameter.shape for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data.fill_(1.0 + accelerator.process_index)
    with GatheredParameters(next(model.parameters())):
        first = next(model.parameters()).unique().tolist()
    with GatheredParameters(model.parameters(), enabled=False):
        disabled = [parameter.numel() for parameter in model.parameters()]
    return [inside == whole, outside == disabled, max(outside) == 0, first]


def test_parameters_that_were_cut_up_are_whole_for_a_while(processes: Sizes) -> None:
    assert processes(2).run(gathered) == [[True, True, True, [1.0]]] * 2
    linear = nn.Linear(2, 2)
    with GatheredParameters(linear.parameters(), modifier_rank=0):
        assert linear.weight.shape == (2, 2)


def in_bfloat16() -> tuple[str, torch.dtype, torch.dtype, list[float]]:
    fresh()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    parts = prepared(accelerator, 4)
    output = parts[0](torch.zeros(2, 8))
    return accelerator.mixed_precision, next(parts[0].parameters()).dtype, output.dtype, loop(accelerator, parts)


def test_bfloat16_forwards_take_and_give_float32(processes: Sizes) -> None:
    expected = alone(1)
    for precision, weights, output, losses in processes(2).run(in_bfloat16):
        assert (precision, weights, output) == ("bf16", torch.bfloat16, torch.float32)
        assert losses == pytest.approx(expected, rel=0.05)


def refusals() -> None:
    fresh()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(), batch_size=4)
    for objects, story in (
        ((optimizer,), "prepare both in one call, not 0 models, 1 optimizers"),
        ((model, network(), optimizer), "not 2 models"),
        ((model, optimizer), "train_micro_batch_size_per_gpu"),
        ((model, DummyOptim(model.parameters()), loader), "which has no 'optimizer'"),
        ((model, optimizer, loader, DummyScheduler(optimizer)), "which has no 'scheduler'"),
    ):
        with pytest.raises(TrainingError, match=story):
            accelerator.prepare(*objects)
    with pytest.raises(TrainingError, match=r"accelerator\.prepare\(model, optimizer"):
        accelerator.prepare_optimizer(optimizer)
    with pytest.raises(TrainingError, match=r"accelerator\.prepare\(model, optimizer"):
        accelerator.prepare_model(model)
    loss = model(torch.ones(1, 8)).sum()
    with pytest.raises(TrainingError, match="Nothing is trained"):
        accelerator.backward(loss)
    teacher = accelerator.prepare(network())
    assert type(teacher) is nn.Sequential
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with pytest.raises(TrainingError, match="make another Accelerator"):
        accelerator.prepare(network(), torch.optim.SGD(network().parameters(), lr=0.1), loader)
    accelerator.backward(model(torch.ones(1, 8)).sum())
    with pytest.raises(TrainingError, match="one backward to a step"):
        accelerator.backward(model(torch.ones(1, 8)).sum())
    with pytest.raises(TrainingError, match=r"called with 0\.5, but gradient_clipping is 1\.0"):
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    with pytest.raises(TrainingError, match="Euclidean"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    with pytest.raises(TrainingError, match="use clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(TrainingError, match="even_batches"), accelerator.join_uneven_inputs([model]):
        pass
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_what_deepspeed_cannot_do_is_refused(processes: Sizes) -> None:
    processes(2).run(refusals)


def refused_settings() -> None:
    for arguments, config, story in (
        ({"mixed_precision": "fp16"}, {}, "does not train in fp16 on cpu"),
        ({}, {"msamp": {"enabled": True}}, "MS-AMP"),
        ({}, {"train_batch_size": 10}, "train_batch_size is 10 in the config and 8 in the script"),
        ({}, {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}, "'auto' for zero_optimization.reduce_bucket_size"),
        ({}, {"optimizer": {"type": "AdamW"}}, "two optimizers, an AdamW and the DeepSpeed config's"),
        ({}, {"scheduler": {"type": "WarmupLR"}}, "two schedulers, an ExponentialLR and the DeepSpeed config's"),
    ):
        fresh()
        plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **config})
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, **arguments)
        with pytest.raises(TrainingError, match=story):
            prepared(accelerator, 4)
    fresh()
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4})
    with pytest.raises(TrainingError, match=r"is 4 in the DeepSpeed config and 2 in the Accelerator"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2)


def test_settings_that_this_machine_cannot_follow_are_refused(processes: Sizes) -> None:
    processes(2).run(refused_settings)


def two_plugins() -> list[bool]:
    fresh()
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    student, optimizer, loader = accelerator.prepare(
        (model := network()), torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), batch_size=4)
    )
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(network())
    accelerator.state.select_deepspeed_plugin("student")
    inputs, _ = next(iter(loader))
    with torch.no_grad():
        wanted = teacher(inputs)
    loss = nn.functional.mse_loss(student(inputs), wanted + 1)
    accelerator.backward(loss)
    optimizer.step()
    return [torch.equal(student(inputs), wanted), float(loss) == pytest.approx(1.0)]


def test_a_sharded_teacher_stands_beside_a_trained_student(processes: Sizes) -> None:
    assert processes(2).run(two_plugins) == [[False, True]] * 2


def test_one_process_needs_no_launcher() -> None:
    import torch.distributed as dist

    fresh()
    expected = alone(1)
    fresh()
    try:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
        parts = prepared(accelerator, 8)
        parts[3].scheduler.gamma = 0.9**2
        assert loop(accelerator, parts) == pytest.approx(expected, rel=TOLERANCE)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def built_by_transformers(folder: str) -> tuple[bool, float, bool]:
    from transformers import BertModel

    fresh()
    expected = BertModel.from_pretrained(folder).eval()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True))
    model = BertModel.from_pretrained(folder)
    sharded = next(model.parameters()).numel() == 0
    prepared_model, _, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), batch_size=4))
    tokens = torch.arange(12).view(2, 6)
    prepared_model.eval()
    found = prepared_model(tokens).last_hidden_state
    difference = float((found - expected(tokens).last_hidden_state).abs().max())
    state = accelerator.get_state_dict(prepared_model)
    return sharded, difference, all(torch.equal(state[name], value) for name, value in expected.state_dict().items() if state)


def test_transformers_builds_a_model_sharded_from_the_start(processes: Sizes, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)
    for sharded, difference, equal in processes(2).run(built_by_transformers, str(tmp_path)):
        assert sharded
        assert difference < 1e-6
        assert equal


def compiled(stage: int) -> tuple[list[float], int]:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    fresh()
    compiler = TorchDynamoPlugin(backend="eager")
    compiler.to_kwargs = lambda: {"backend": backend}  # type: ignore[method-assign]
    accelerator = Accelerator(cpu=True, dynamo_plugin=compiler, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    return loop(accelerator, prepared(accelerator, 4)), len(graphs)


def test_a_compiled_engine_computes_the_same(processes: Sizes) -> None:
    expected = alone(1)
    for losses, graphs in processes(2).run(compiled, 2):
        assert graphs > 0
        assert losses == pytest.approx(expected, rel=TOLERANCE)
    with pytest.raises(RanksFailed, match="ZeRO stage 3 brings each module's parameters"):
        processes(2).run(compiled, 3)
