"""The Accelerator in several processes: the training of one process, shared between them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from processes import Processes, RanksFailed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import bigmodel
from bigmodel.errors import DistributedOperationException, TrainingError
from bigmodel.training.accelerator import Accelerator
from bigmodel.training.configuration import DataLoaderConfiguration, GradientAccumulationPlugin
from bigmodel.training.handlers import DistributedDataParallelKwargs, GradScalerKwargs

pytestmark = pytest.mark.xdist_group("processes")

Sizes = Callable[[int], Processes]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def train(
    batch_size: int, count: int = 24, epochs: int = 2, *, split: bool = False, decay: float = 0.1, **arguments: Any
) -> dict[str, Any]:
    """A loop as users write it; weights and losses of this process."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split), **arguments)
    model: Any = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(samples(count), batch_size=batch_size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, inner, loader, LambdaLR(inner, lambda step: 1 / (1 + decay * step)))
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 10.0) if accelerator.sync_gradients else None
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    own = accelerator.unwrap_model(model)
    return {
        "losses": losses,
        "weights": [parameter.detach().clone() for parameter in own.parameters()],
        "norm": None if norm is None else norm.item(),
        "rate": scheduler.get_last_lr()[0],
        "wrapped": isinstance(model, DistributedDataParallel),
        "dtype": model(torch.ones(1, 4)).dtype,
    }


@pytest.mark.parametrize("count", [2, 3])
def test_shared_batches_train_as_in_one_process(processes: Sizes, count: int) -> None:
    alone = train(12)
    ranks = processes(count).run(train, 12, split=True)
    for rank in ranks:
        assert rank["wrapped"]
        assert rank["rate"] == pytest.approx(alone["rate"], rel=1e-12)
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        for ours, theirs in zip(rank["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert all(map(torch.equal, rank["weights"], ranks[0]["weights"]))


def test_accumulation_in_two_processes_is_a_large_batch_in_one(processes: Sizes) -> None:
    alone = train(12, decay=0.0)
    for plugin in (
        GradientAccumulationPlugin(num_steps=3),
        GradientAccumulationPlugin(num_steps=3, sync_each_batch=True),
    ):
        for rank in processes(2).run(train, 2, decay=0.0, gradient_accumulation_plugin=plugin):
            for ours, theirs in zip(rank["weights"], alone["weights"], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_half_precision_and_compressed_gradients_stay_near(processes: Sizes) -> None:
    alone = train(12, decay=0.0)
    handler = DistributedDataParallelKwargs(comm_hook="bf16", gradient_as_bucket_view=True, bucket_cap_mb=1)
    for rank in processes(2).run(train, 6, decay=0.0, mixed_precision="bf16", kwargs_handlers=[handler]):
        assert rank["dtype"] == torch.float32
        assert rank["losses"] == pytest.approx(alone["losses"], rel=0.05)
    scale = GradScalerKwargs(init_scale=256.0)
    for rank in processes(2).run(train, 6, decay=0.0, mixed_precision="fp16", kwargs_handlers=[scale]):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=0.01)


def what_no_sync_does() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    inner = accelerator.unwrap_model(model)
    data = torch.full((1, 1), float(accelerator.process_index + 1))
    with accelerator.no_sync(model):
        accelerator.backward(model(data).sum())
    alone = inner.weight.grad.item()
    with accelerator.no_sync(model):
        loss = model(data).sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    first = inner.weight.grad.item()
    inner.weight.grad = None
    accelerator.backward(model(data).sum())
    return {"alone": alone, "triggered": first, "after": inner.weight.grad.item()}


def test_gradients_travel_when_they_should(processes: Sizes) -> None:
    ranks = processes(2).run(what_no_sync_does)
    assert [rank["alone"] for rank in ranks] == [1.0, 2.0]
    assert [rank["triggered"] for rank in ranks] == [3.0, 3.0]  # (1 + 1 + 2 + 2) / 2
    assert [rank["after"] for rank in ranks] == [1.5, 1.5]


Pair = namedtuple("Pair", ["numbers", "words"])


@dataclass
class Answer:
    numbers: torch.Tensor
    words: list[str]


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Any:
        return iter(torch.arange(self.count))


class Sentences(Dataset[dict[str, Any]]):
    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "words": f"sentence {index}"}


def gathered(cases: list[tuple[int, int, dict[str, Any], bool]]) -> list[list[int]]:
    """For each case, the samples that the metric sees, in one epoch after another over the same loader."""
    found = []
    for count, batch_size, config, stream in cases:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        dataset: Any = Stream(count) if stream else TensorDataset(torch.arange(count))
        loader = accelerator.prepare(DataLoader(dataset, batch_size=batch_size))
        for _ in range(2):
            seen = []
            for batch in loader:
                numbers = batch if stream else batch[0]
                seen += accelerator.gather_for_metrics(numbers).tolist()
            found.append(seen)
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_every_sample_is_counted_once(processes: Sizes, count: int) -> None:
    cases: list[tuple[int, int, dict[str, Any], bool]] = []
    for size in (*range(1, 14), 17, 24, 25):
        for batch in (1, 2, 3, 5):
            cases += [
                (size, batch, {}, False),
                (size, batch * count, {"split_batches": True}, False),
                (size, batch, {"dispatch_batches": True}, False),
                (size, batch, {"dispatch_batches": True}, True),
                (size, batch, {"dispatch_batches": False}, True),
            ]
    for rank in processes(count).run(gathered, cases):
        for position, (size, batch, config, stream) in enumerate(cases):
            for seen in rank[2 * position : 2 * position + 2]:
                assert seen == list(range(size)), f"{size} samples, batches of {batch}, {config}, stream: {stream}"


def uneven_last_batches() -> list[list[int]]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(7)), batch_size=2))
    return [accelerator.gather_for_metrics(batch[0]).tolist() for batch in loader]


def test_last_batches_of_different_lengths_are_gathered_whole(processes: Sizes) -> None:
    for rank in processes(2).run(uneven_last_batches):
        assert rank == [[0, 1, 2, 3], [4, 5, 6]]


def chosen_samples() -> tuple[list[list[int]], str]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), batch_size=2))
    seen = [accelerator.gather_for_metrics((batch[0][batch[0] % 3 == 0], batch[0]))[0].tolist() for batch in loader]
    with pytest.raises(DistributedOperationException) as caught:
        accelerator.gather_for_metrics(torch.ones(2, 1 + accelerator.process_index))
    return seen, str(caught.value)


def test_samples_that_the_script_has_chosen_are_gathered_whole(processes: Sizes) -> None:
    for seen, message in processes(2).run(chosen_samples):
        assert seen == [[0, 3], [6], [9]]
        assert "[2, 1]" in message
        assert "[2, 2]" in message


def structures(use_gather_object: bool) -> Any:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Sentences(5), batch_size=2))
    seen = []
    for batch in loader:
        index, words = batch["index"], batch["words"]
        seen.append(
            accelerator.gather_for_metrics(
                {
                    "words": words,
                    "loss": torch.tensor(float(accelerator.process_index)),
                    "pair": Pair(index, words),
                    "answer": Answer(index * 2, words),
                    "list": [index, {"deep": index}, words],
                    "nothing": None,
                    "rank": accelerator.process_index,
                    "boxes": [torch.full((int(i) % 2 + 1,), int(i)) for i in index] if use_gather_object else None,
                },
                use_gather_object=use_gather_object,
            )
        )
    return seen


def test_structures_keep_their_form_and_lose_what_is_repeated(processes: Sizes) -> None:
    for first, last in processes(2).run(structures, False):
        assert first["words"] == [f"sentence {i}" for i in range(4)]
        assert last["words"] == ["sentence 4"]
        assert last["loss"].tolist() == [0.0, 1.0]  # one of each process, none of a sample
        assert last["rank"] == [0, 1]
        assert isinstance(last["pair"], Pair)
        assert (last["pair"].numbers.tolist(), last["pair"].words) == ([4], ["sentence 4"])
        assert (first["answer"].numbers.tolist(), last["answer"].words) == ([0, 2, 4, 6], ["sentence 4"])
        assert (last["list"][0].tolist(), last["list"][1]["deep"].tolist(), last["list"][2]) == ([4], [4], ["sentence 4"])
        assert last["nothing"] is None
    for first, last in processes(2).run(structures, True):
        assert [box.tolist() for box in first["boxes"]] == [[0], [1, 1], [2], [3, 3]]
        assert [box.tolist() for box in last["boxes"]] == [[4]]


def uneven_training(backend: str) -> tuple[int, int]:
    accelerator = Accelerator(cpu=True, dynamo_backend=backend)
    model, loader = accelerator.prepare(network(), DataLoader(samples(5), batch_size=1))
    steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for inputs, _ in loader:
            accelerator.backward(model(inputs).sum())
            steps += 1
    even = sum(1 for _ in loader)
    return steps, even


def test_processes_may_run_out_of_batches(processes: Sizes) -> None:
    assert processes(2).run(uneven_training, "no") == [(3, 3), (2, 3)]
    assert processes(2).run(uneven_training, "eager") == [(3, 3), (2, 3)]


def joined_without_gradients() -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.join_uneven_inputs([accelerator.prepare(nn.Flatten())]):
        pass


def test_a_model_without_gradients_cannot_be_joined(processes: Sizes) -> None:
    with pytest.raises(RanksFailed, match="Flatten cannot be joined"):
        processes(2).run(joined_without_gradients)


def together() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if rank == 1:
        accelerator.set_trigger()
    triggers = [accelerator.check_trigger(), accelerator.check_trigger()]
    padded = accelerator.pad_across_processes(torch.ones(rank + 1))
    ready = accelerator.prepare_model(network(), evaluation_mode=True)
    bigmodel.cpu_offload(offloaded := network())
    return {
        "gathered": accelerator.gather(torch.tensor([rank])).tolist(),
        "sum": accelerator.reduce(torch.tensor(rank + 1.0)).item(),
        "padded": padded.tolist(),
        "triggers": triggers,
        "evaluated": type(ready).__name__,
        "offloaded": type(accelerator.prepare(offloaded)).__name__,
        "main": accelerator.on_main_process(lambda: "main")(),
    }


def test_processes_speak_to_each_other(processes: Sizes) -> None:
    first, second = processes(2).run(together)
    for rank in (first, second):
        assert rank["gathered"] == [0, 1]
        assert rank["sum"] == 3.0
        assert rank["triggers"] == [True, False]
        assert (rank["evaluated"], rank["offloaded"]) == ("Sequential", "Sequential")
    assert (first["padded"], second["padded"]) == ([1.0, 0.0], [1.0, 1.0])
    assert (first["main"], second["main"]) == ("main", None)


def dispatched_training() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    bigmodel.cpu_offload(model)
    accelerator.prepare(nn.Sequential(model, nn.Linear(1, 1)))
    model.append(nn.Linear(1, 1))
    accelerator.prepare(model)


def test_a_dispatched_model_with_trainable_parts_is_refused(processes: Sizes) -> None:
    with pytest.raises(RanksFailed, match="2 processes cannot average its gradients") as caught:
        processes(2).run(dispatched_training)
    assert all(isinstance(error, TrainingError) for error in caught.value.errors.values())
