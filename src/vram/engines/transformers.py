"""A callback for trainers of transformers and TRL that publishes the model, and updates it in place as it trains.

``Trainer(..., callbacks=[PublishCallback("policy")])``: rollout processes attach ``"policy"`` once, and read each batch
in a section (:meth:`vram.Lease.reading`).
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

import vram

from ..errors import UsageError


class PublishCallback(TrainerCallback):  # type: ignore[misc]
    """Publish the model's parameters and persistent buffers where training begins, and write them there anew after
    every so many steps, and in the end.

    One copy of the weights beside the trainer's own. Of several processes that train, the first one publishes; each has
    to have the whole model, and not a part of it.

    Parameters
    ----------
    name : str
        The entry. It stays when training is over.
    every : int
        Steps of the optimizer from one update to the next.
    timeout : float or None
        Seconds for which an update waits for readers; None waits for ever.
    keeper : Keeper, str or PathLike, optional
        As of :func:`vram.publish`.

    Raises
    ------
    UsageError
        Where training begins: if this process has only a part of the model.
    WaitTimeoutError
        At a step: if a reader was still in a section after `timeout` seconds.
    """

    def __init__(self, name: str, *, every: int = 1, timeout: float | None = 60.0, keeper: Any = None) -> None:
        if type(every) is not int or every < 1:
            raise UsageError(f"every is a number of steps, at least 1, and not {every!r:.40}")
        self.name, self.every, self.timeout, self.keeper = name, every, timeout, keeper
        self._published_at = -1  # the step whose weights are in the entry

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Publish the model."""
        if state.is_world_process_zero:
            vram.publish(self.name, model, updatable=True, keeper=self.keeper)
            self._published_at = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Update the entry, if it is time to."""
        if state.global_step - self._published_at >= self.every:
            self._update(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Update the entry with the weights that are the last."""
        self._update(state, model)

    def _update(self, state: Any, model: Any) -> None:
        if not state.is_world_process_zero or state.global_step == self._published_at:
            return
        with vram.update(self.name, timeout=self.timeout, keeper=self.keeper) as arrays:
            for name, tensor in model.state_dict().items():
                arrays[name].torch().copy_(tensor)
        self._published_at = state.global_step
