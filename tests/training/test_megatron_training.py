"""Training with megatron-core on CPUs: losses, norms, weights and files are those of a transformers model in a loop of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import TOLERANCE, alone, fresh, gpt2, llama, loop, prepared, samples
from processes import Processes
from torch.utils.data import DataLoader, IterableDataset

from bigmodel import Accelerator, CheckpointNotFoundError, MatchError, TrainingError
from bigmodel.utils import MegatronLMDummyScheduler, MegatronLMPlugin

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'bigmodel[megatron]'")

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.filterwarnings("ignore")]

Sizes = Callable[[int], Processes]


def with_megatron(tp_degree: int, make: Callable[[], Any], clipping: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    accelerator, parts = prepared(tp_degree, make)
    return loop(accelerator, parts, clipping) + loop(accelerator, parts, clipping), accelerator.get_state_dict(parts[0])


@pytest.mark.parametrize(
    ("count", "tp_degree", "make", "clipping"),
    [(1, 1, llama, 1.0), (2, 1, llama, 0.5), (2, 2, llama, 0.5), (4, 2, llama, 0.5), (2, 2, gpt2, 0.5), (2, 1, gpt2, 0.5)],
)
def test_losses_norms_and_weights_are_those_of_plain_torch(
    processes: Sizes, count: int, tp_degree: int, make: Callable[[], Any], clipping: float
) -> None:
    expected, weights = alone(make, clipping, epochs=2)
    found = processes(count).run(with_megatron, tp_degree, make, clipping, timeout=120)
    for seen, _ in found:
        assert seen == pytest.approx(expected, rel=TOLERANCE)
    assert found[0][1].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[0][1][name], value, rtol=0, atol=2e-5, msg=name)


def clipped_by_the_plugin(tp_degree: int) -> list[float]:
    return loop(*prepared(tp_degree, llama, gradient_clipping=0.5))


def test_the_step_clips_as_the_plugin_says(processes: Sizes) -> None:
    expected, _ = alone(llama, 0.5)
    for seen in processes(2).run(clipped_by_the_plugin, 2, timeout=120):
        assert seen == pytest.approx(expected[::2], rel=TOLERANCE)


def accumulated() -> tuple[int, list[float], list[float]]:
    accelerator, parts = prepared(2, llama, num_micro_batches=2, gradient_clipping=0.0)
    with pytest.raises(TrainingError, match=r"num_micro_batches=2 makes 2 batches of the loader one step.*accelerator.accumulate"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    steps = accelerator.gradient_accumulation_steps
    losses = loop(accelerator, parts)
    accelerator, (model, optimizer, loader, _) = prepared(1, llama, gradient_clipping=0.0)
    other = []
    for batch in loader:  # the same by hand: two copies, and gradients added up in each
        with accelerator.no_sync(model) if len(other) % 2 == 0 else accelerator.trigger_sync_in_backward(model):
            loss = model(**batch).loss
            accelerator.backward(loss / 2)
        other.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        if len(other) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return steps, losses, other


def test_micro_batches_are_batches_of_one_step(processes: Sizes) -> None:
    model = llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    expected = []
    for number, batch in enumerate(DataLoader(samples(), batch_size=4)):
        loss = model(**batch).loss
        (loss / 2).backward()
        expected.append(float(loss))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for steps, losses, other in processes(2).run(accumulated, timeout=120):
        assert steps == 2
        assert losses[:3] == pytest.approx(expected[:3], rel=TOLERANCE)  # its schedule has stepped by then
        assert other == pytest.approx(expected, rel=TOLERANCE)


def stopped_and_resumed(folder: str, first_degree: int, then_degree: int) -> tuple[list[float], list[float]]:
    accelerator, parts = prepared(first_degree, llama)
    loop(accelerator, parts)
    accelerator.save_state(folder)
    whole = loop(accelerator, parts)
    accelerator, parts = prepared(then_degree, llama)
    with torch.no_grad():
        for parameter in parts[0].parameters():
            parameter.zero_()
    gamma = parts[3].scheduler.gamma
    accelerator.load_state(folder)
    parts[3].scheduler.gamma = gamma  # of as many copies as there are now
    return whole, loop(accelerator, parts)


@pytest.mark.parametrize(("first_degree", "then_degree"), [(2, 2), (2, 1), (1, 2)])
def test_a_job_goes_on_from_its_files_whatever_the_degrees(processes: Sizes, first_degree: int, then_degree: int, tmp_path: Path) -> None:
    for whole, resumed in processes(2).run(stopped_and_resumed, str(tmp_path / "state"), first_degree, then_degree, timeout=120):
        if first_degree == then_degree:
            assert resumed == whole
        else:
            assert resumed == pytest.approx(whole, rel=TOLERANCE)
    files = {file.name for file in (tmp_path / "state").iterdir()}
    assert {"megatron_model", "megatron_optimizer", "optimizer.bin"} <= files


def without_the_optimizer(folder: str) -> None:
    accelerator, _ = prepared(2, llama, no_save_optim=True)
    accelerator.save_state(folder)
    accelerator, parts = prepared(2, llama, no_load_optim=True)
    loop(accelerator, parts)
    accelerator.load_state(folder)
    assert parts[1].state  # what it had
    accelerator, _ = prepared(2, llama)
    with pytest.raises(CheckpointNotFoundError, match=r"there is no optimizer\.bin"):
        accelerator.load_state(folder)


def test_the_optimizers_state_stays_out_where_the_plugin_says_so(processes: Sizes, tmp_path: Path) -> None:
    processes(2).run(without_the_optimizer, str(tmp_path / "state"), timeout=120)
    assert not list((tmp_path / "state").glob("*optim*"))


def other_parameters(folder: str) -> None:
    accelerator, _ = prepared(2, llama)
    accelerator.save_state(folder)
    fresh()
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    model = llama()
    model.model.norm.requires_grad_(False)
    accelerator.prepare(model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad]))
    with pytest.raises(MatchError, match=r"other parameters than it has: 0\.decoder\.final_layernorm\.weight"):
        accelerator.load_state(folder)


def test_an_optimizer_of_other_parameters_is_not_filled(processes: Sizes, tmp_path: Path) -> None:
    processes(2).run(other_parameters, str(tmp_path / "state"), timeout=120)


def saved_for_others(folder: str, make: Callable[[], Any]) -> None:
    accelerator, parts = prepared(2, make)
    accelerator.save_model(parts[0], folder)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_other_programs_read_the_weights(processes: Sizes, make: Callable[[], Any], tmp_path: Path) -> None:
    processes(2).run(saved_for_others, str(tmp_path), make, timeout=120)
    model = make()
    model.config.save_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name


def evaluated(make: Callable[[], Any]) -> tuple[torch.Tensor, torch.Tensor, float, dict[str, list[int]]]:
    accelerator, (model, *_) = prepared(2, make, return_logits=True)
    model.eval()
    batch = next(iter(DataLoader(samples(), batch_size=5)))
    with torch.no_grad():
        unlabelled = model(batch["input_ids"], batch["attention_mask"]).logits
        labelled = model(**batch)
    seen: dict[str, list[int]] = {"tensors": [], "lists": [], "stream": []}
    size = 4 * 2 // accelerator.num_processes
    for batch in accelerator.prepare(DataLoader(samples()[:14], batch_size=size)):
        rows, firsts = accelerator.gather_for_metrics((batch["input_ids"], batch["input_ids"][:, 0].tolist()))
        seen["tensors"] += rows[:, 0].tolist()
        seen["lists"] += firsts
    for batch in accelerator.prepare(DataLoader(Stream(), batch_size=size)):
        seen["stream"] += accelerator.gather_for_metrics(batch["input_ids"])[:, 0].tolist()
    return unlabelled, labelled.logits, float(labelled.loss), seen


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(samples()[:14])


@pytest.mark.parametrize("make", [llama, gpt2])
def test_logits_are_whole_and_every_sample_counts_once(processes: Sizes, make: Callable[[], Any]) -> None:
    model = make().eval()
    batch = next(iter(DataLoader(samples(), batch_size=5)))
    with torch.no_grad():
        expected = model(**batch)
    real = batch["attention_mask"].bool()
    firsts = [int(sample["input_ids"][0]) for sample in samples()[:14]]
    for count in (2, 4):
        for unlabelled, labelled, loss, seen in processes(count).run(evaluated, make, timeout=120):
            torch.testing.assert_close(unlabelled[real], expected.logits[real], rtol=1e-4, atol=1e-5)
            assert torch.equal(unlabelled, labelled)
            assert loss == pytest.approx(float(expected.loss), rel=TOLERANCE)  # all copies have the same tokens here
            assert seen == {"tensors": firsts, "lists": firsts, "stream": firsts}


def schedules() -> list[list[float]]:
    found = []
    for fields, stand_in in (
        ({"train_iters": 8, "lr_warmup_iters": 2, "lr_decay_style": "linear", "min_lr": 0.001}, {}),
        ({"lr_decay_style": "cosine"}, {"total_num_steps": 4, "warmup_num_steps": 1}),
        ({"train_iters": 4, "weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.2}, {}),
    ):
        fresh()
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, **fields))
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        scheduler = MegatronLMDummyScheduler(optimizer, **stand_in)
        parts = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=4), scheduler)
        rates = []
        for batch in parts[2]:
            with accelerator.accumulate(parts[0]):
                accelerator.backward(parts[0](**batch).loss)
                parts[1].step()
                parts[3].step()
                parts[1].zero_grad()
            rates += [parts[3].get_last_lr()[0], parts[1].param_groups[0]["weight_decay"]]
        found.append(rates)
        state = parts[3].state_dict()
        parts[3].load_state_dict(state)
        assert parts[3].state_dict() == state
        assert parts[3].get_last_lr()[0] == rates[-2]
    return found


def test_the_plugin_describes_the_schedule(processes: Sizes) -> None:
    for rising, cosine, growing in processes(2).run(schedules, timeout=120):
        assert rising[::2] == pytest.approx([0.005, 0.01, 0.01 - 0.009 / 6, 0.01 - 0.009 / 3])
        assert rising[1::2] == [0.1] * 4
        assert cosine[::2] == pytest.approx([0.01, 0.0075, 0.0025, 0.0])
        assert growing[1::2] == pytest.approx([0.05, 0.1, 0.15, 0.2])
