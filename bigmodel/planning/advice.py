"""What would help a plan: the same request with one thing changed, each with its effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from ..devices import DeviceKey
from ..errors import PlanError
from ..protocols import TensorSpec, WeightFormat
from ..text import bytes_text

if TYPE_CHECKING:
    from .plan import Plan
    from .request import Request

__all__ = ["Advice", "advise"]

MOST: Final = 6
"""Changes that are worth reading."""
WORTH_SAYING: Final = 0.02
"""Share of the bytes that travel (or rest on disk) that a change has to save."""
NEGLIGIBLE: Final = 0.001
"""Share of the model that may travel without being worth a word."""
NARROW: Final = (torch.float16, torch.bfloat16, *(prefix + name for name in ("float16", "bfloat16") for prefix in ("", "torch.")))
BIGGER_CARD: Final = 4
"""How many times its memory a card may grow to be thought of as another card."""
MOST_CARDS: Final = 64
CARDS_TRIED: Final = 4
"""Blocks do not fill every card to the last byte, so that a few more may be needed than bytes alone would have it."""
SMALLEST_CONTEXT: Final = 256
"""Tokens below which a shorter context is no answer."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change of the request, and what the plan would become."""

    change: str
    """What to do, for people: `"4-bit weights (nf4)"`, `"one more card of 24.0 GiB"`."""
    main_device: DeviceKey
    """Where what travels would run."""
    moved_bytes: int
    """Bytes that would travel in every step."""
    disk_bytes: int
    """Bytes that would rest on disk."""
    fits: bool
    """Whether everything would stay on the devices that compute, accelerators where there are any; but for a thousandth of the model."""
    token_seconds: float | None = None
    """Seconds per decoded token, over the batch, where the plan has a prediction."""


@dataclass(frozen=True, slots=True)
class _Change:
    """A request with one thing changed (or two), not yet solved."""

    text: str
    request: Request


def advise(request: Request, found: Plan, solve: Callable[[Request], Plan], formats: Sequence[WeightFormat]) -> tuple[Advice, ...]:
    """The changes that would let fewer bytes travel than `found` does, or fewer of them from disk, the best first.

    None if nothing to speak of travels, unless that is so because no accelerator can run the model, and the CPU does. `solve` plans a
    changed request, without advice. Proposed are half precision, packed `formats`, fewer logits, a shorter context and a smaller batch (the
    largest that lets everything stay, by halving), another card like the largest, a bigger one, and more RAM where something rests on disk.
    Only where none of them lets everything stay, a packed format together with one of the others, and as many cards as it takes.
    """
    if _fits(found):
        return ()
    singles = [(change, made) for change in _changes(request, found, formats, solve) if (made := _solved(change, solve)) is not None]
    helpful = [(change, made) for change, made in singles if _helps(made, found)]
    said = [_advice(change, made) for change, made in helpful]
    if not any(advice.fits for advice in said):
        for change, made in helpful:
            if made.weight_format != found.weight_format:
                said += _together(change, made, solve)
        said += _more_cards(request, found, solve)
    said.sort(key=_rank(said))
    return tuple(said[:MOST])


def _solved(change: _Change, solve: Callable[[Request], Plan]) -> Plan | None:
    try:
        return solve(change.request)
    except PlanError:  # what cannot be planned is no advice
        return None


def _gives_way(made: Plan) -> bool:
    """Whether the CPU runs everything although there are accelerators."""
    return made.main_device == "cpu" and any(use.device not in ("cpu", "disk") and use.budget_bytes for use in made.devices)


def _fits(made: Plan) -> bool:
    return made.moved_bytes <= NEGLIGIBLE * made.total_bytes and not _gives_way(made)


def _helps(made: Plan, found: Plan) -> bool:
    """Whether accelerators run the model at last, or fewer bytes to speak of move, or as many and fewer of them from disk."""
    if _gives_way(made) or _gives_way(found):
        return not _gives_way(made)
    if made.moved_bytes <= (1 - WORTH_SAYING) * found.moved_bytes:
        return True
    return made.moved_bytes <= found.moved_bytes and made.bytes_on_disk < (1 - WORTH_SAYING) * found.bytes_on_disk


def _advice(change: _Change, made: Plan) -> Advice:
    seconds = None if made.prediction is None else made.prediction.decode_seconds / made.prediction.batch
    return Advice(change.text, made.main_device, made.moved_bytes, made.bytes_on_disk, _fits(made), seconds)


def _rank(said: Sequence[Advice]) -> Callable[[Advice], tuple[bool, float, int]]:
    """Those that let everything stay first; then the fastest, or where no times are known those that move least. Ties keep their order."""
    timed = all(advice.token_seconds is not None for advice in said)

    def rank(advice: Advice) -> tuple[bool, float, int]:
        cost = advice.token_seconds if timed and advice.token_seconds is not None else advice.moved_bytes
        return not advice.fits, cost, advice.disk_bytes

    return rank


def _together(packed: _Change, made: Plan, solve: Callable[[Request], Plan]) -> Iterator[Advice]:
    """The packed format, planned as `made`, with one more change each, where that lets everything stay."""
    for change in _changes(packed.request, made, (), solve):
        both = _solved(change, solve)
        if both is not None and _fits(both):
            yield _advice(_Change(f"{packed.text} and {change.text}", change.request), both)


def _more_cards(request: Request, found: Plan, solve: Callable[[Request], Plan]) -> Iterator[Advice]:
    """As many cards like the largest as let everything stay."""
    cards = _cards(request)
    if not cards or not found.short_bytes:
        return
    largest, first = max(cards.values()), max(cards) + 1
    least = max(2, -(-found.short_bytes // largest))
    for number in range(least, min(least + CARDS_TRIED, MOST_CARDS)):
        budgets = dict(request.budgets)
        for index in range(number):
            budgets = _with(budgets, first + index, largest)
        change = _Change(f"{number} more cards of {bytes_text(largest)}", replace(request, budgets=budgets))
        made = _solved(change, solve)
        if made is not None and _fits(made):
            yield _advice(change, made)
            return


def _cards(request: Request) -> dict[int, int]:
    """What the accelerators offer, by index."""
    return {key: size for key, size in request.budgets.items() if isinstance(key, int) and size}


def _changes(request: Request, found: Plan, formats: Sequence[WeightFormat], solve: Callable[[Request], Plan]) -> Iterator[_Change]:
    """All single changes, those that cost nothing first."""
    yield from _other_weights(request, formats)
    if request.workload.context is not None:
        yield from _less_of_a_run(request, solve)
    yield from _more_memory(request, found)


def _other_weights(request: Request, formats: Sequence[WeightFormat]) -> Iterator[_Change]:
    """Smaller weights, those that change them least first."""
    now = 16 if request.weight_format is None else _bits(request.weight_format)
    if request.weight_format is None and request.dtype not in NARROW:
        yield _Change("half precision (bfloat16)", replace(request, dtype=torch.bfloat16))
    for format_ in sorted(formats, key=_bits, reverse=True):
        if _bits(format_) < now:
            yield _Change(f"{_bits(format_)}-bit weights ({format_.name})", replace(request, weight_format=format_))


def _bits(format_: WeightFormat) -> int:
    """Bits of an element in a matrix of a usual size, without its companions."""
    return int(8 * format_.packed_bytes(TensorSpec((4096, 4096), torch.bfloat16)) / 4096**2)


def _less_of_a_run(request: Request, solve: Callable[[Request], Plan]) -> Iterator[_Change]:
    """Fewer logits; a shorter context, and a smaller batch: half as often as it takes, if any such lets everything stay, else half."""
    run = request.workload
    if run.logits == "all":
        yield _Change("logits of the last token only (logits='last')", replace(request, workload=replace(run, logits="last")))
    context, batch = run.context or 1, run.batch
    yield from _halved(
        [
            (f"a context of {size} tokens", replace(request, workload=replace(run, context=size)))
            for size in _halves(context, SMALLEST_CONTEXT)
        ],
        solve,
    )
    yield from _halved(
        [(f"a batch of {size}", replace(request, workload=replace(run, batch=size))) for size in _halves(batch, 1)],
        solve,
    )


def _halves(number: int, least: int) -> list[int]:
    sizes = []
    while number // 2 >= least:
        number //= 2
        sizes.append(number)
    return sizes


def _halved(choices: Sequence[tuple[str, Request]], solve: Callable[[Request], Plan]) -> Iterator[_Change]:
    """Of choices that get smaller, the first that lets everything stay; else the first."""
    if not choices:
        return
    low, high = 0, len(choices) - 1
    smallest = _solved(_Change(*choices[high]), solve)
    if smallest is None or not _fits(smallest):
        yield _Change(*choices[0])
        return
    while low < high:
        middle = (low + high) // 2
        made = _solved(_Change(*choices[middle]), solve)
        low, high = (low, middle) if made is not None and _fits(made) else (middle + 1, high)
    yield _Change(*choices[high])


def _more_memory(request: Request, found: Plan) -> Iterator[_Change]:
    budgets = dict(request.budgets)
    cards = _cards(request)
    main, short = found.main_device, found.short_bytes
    if cards and main == "cpu":  # what runs there now would run on the first card
        main = next(iter(cards))
        short = sum(use.used_bytes - use.reserve_bytes for use in found.devices) - cards[main]
    if cards:
        largest = max(cards.values())
        yield _Change(f"one more card of {bytes_text(largest)}", replace(request, budgets=_with(budgets, max(cards) + 1, largest)))
    have = budgets.get(main, 0)
    if main == "cpu":
        yield _Change(f"{bytes_text(short)} more RAM", replace(request, budgets=_with(budgets, "cpu", have + short)))
    elif have + short <= BIGGER_CARD * have:
        yield _Change(f"{bytes_text(short)} more on device {main}", replace(request, budgets=_with(budgets, main, have + short)))
    if main != "cpu" and found.bytes_on_disk:
        more = f"{bytes_text(found.bytes_on_disk)} more RAM"
        yield _Change(more, replace(request, budgets=_with(budgets, "cpu", budgets.get("cpu", 0) + found.bytes_on_disk)))


def _with(budgets: dict[DeviceKey, int], device: DeviceKey, nbytes: int) -> dict[DeviceKey, int]:
    """The budgets with another one for `device`, in device order."""
    changed = budgets | {device: nbytes}
    cards = sorted(key for key in changed if isinstance(key, int))
    return {key: changed[key] for key in [*cards, *(key for key in ("mps", "cpu", "disk") if key in changed)]}
