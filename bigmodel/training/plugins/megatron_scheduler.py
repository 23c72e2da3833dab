"""megatron-core's schedule of learning rate and weight decay, over a torch optimizer."""

from __future__ import annotations

from typing import Any

from ...errors import TrainingError
from ..optimizer import AcceleratedOptimizer
from ..scheduler import AcceleratedScheduler

__all__ = ["MegatronLMDummyScheduler", "MegatronScheduler", "megatron_schedule"]


class MegatronLMDummyScheduler:
    """In the place of a scheduler: `Accelerator.prepare` makes the one that the `MegatronLMPlugin` describes.

    Args:
        optimizer: whose learning rate and weight decay it sets.
        total_num_steps, warmup_num_steps: steps of the optimizer, where the plugin says nothing (`train_iters`, `lr_decay_iters`,
            `lr_warmup_iters`, `lr_warmup_fraction`).
    """

    def __init__(self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0):
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps


class MegatronScheduler(AcceleratedScheduler):
    """megatron-core's `OptimizerParamScheduler`: one step with each step of the optimizer, whatever the number of processes.

    Args:
        scheduler: the `OptimizerParamScheduler`.
        optimizer: the prepared optimizer.
    """

    def __init__(self, scheduler: Any, optimizer: AcceleratedOptimizer):
        super().__init__(scheduler, optimizer)
        self._optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step, where the optimizer has made one."""
        if self.gradient_state.sync_gradients and not self._optimizer.step_was_skipped:
            self.scheduler.step(1)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from the step of `state_dict`."""
        self.scheduler.num_steps = 0  # the one inside adds up
        self.scheduler.load_state_dict(state_dict)


def megatron_schedule(plugin: Any, stand_in: MegatronLMDummyScheduler, optimizer: AcceleratedOptimizer) -> MegatronScheduler:
    """The schedule that a plugin describes, or else the stand-in.

    Learning rates rise from 0 to those of the optimizer's groups. Raises `TrainingError` where nothing says how many steps there are, or
    the numbers contradict each other.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    total = plugin.train_iters or stand_in.total_num_steps
    decay = plugin.lr_decay_iters or total
    if not decay:
        raise TrainingError("MegatronLMDummyScheduler: give MegatronLMPlugin(train_iters=…), or total_num_steps.")
    if plugin.lr_warmup_iters is not None and plugin.lr_warmup_fraction is not None:
        raise TrainingError("lr_warmup_iters and lr_warmup_fraction are both given; give one.")
    warmup = stand_in.warmup_num_steps if plugin.lr_warmup_iters is None else plugin.lr_warmup_iters
    if plugin.lr_warmup_fraction is not None:
        warmup = int(plugin.lr_warmup_fraction * decay)
    if warmup >= decay:
        raise TrainingError(f"The learning rate rises for {warmup} steps and falls until step {decay}: there have to be more.")
    if plugin.lr_decay_style == "WSD":
        raise TrainingError("lr_decay_style='WSD': MegatronLMPlugin does not say when the fall begins. Use a scheduler of torch.")
    usual = float(optimizer.defaults.get("weight_decay", 0.0))
    start = usual if plugin.start_weight_decay is None else plugin.start_weight_decay
    end = usual if plugin.end_weight_decay is None else plugin.end_weight_decay
    if end < start or (plugin.weight_decay_incr_style == "constant" and end != start):
        raise TrainingError(
            f"weight decay goes from {start} to {end} with weight_decay_incr_style={plugin.weight_decay_incr_style!r}: it grows with "
            "'linear' and 'cosine', and stays with 'constant'."
        )
    for group in optimizer.param_groups:
        if group["lr"] < plugin.min_lr:
            raise TrainingError(f"min_lr={plugin.min_lr} is above the optimizer's {group['lr']}.")
        group.update(max_lr=group["lr"], min_lr=plugin.min_lr, wd_mult=group.get("weight_decay", 0.0) / usual if usual else 1.0)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=max(group["lr"] for group in optimizer.param_groups),
        min_lr=plugin.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=plugin.lr_decay_style,
        start_wd=start,
        end_wd=end,
        wd_incr_steps=total or decay,
        wd_incr_style=plugin.weight_decay_incr_style,
    )
    return MegatronScheduler(schedule, optimizer)
