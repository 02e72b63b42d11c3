"""Retention of a run's checkpoints: the last N, every Kth, and the best by validation loss.

Rank 0, which holds the lock of ``--save``, acts after all ranks have ended a checkpoint::

  record    the step with the lowest validation loss, in best_checkpoint.json
  choose    steps up to the one just saved; the last N with files of the saved sizes stay
  rename    iter_0000100 -> iter_0000100.removed, on the main thread: a kill leaves no half a step
  delete    on a thread; what a kill leaves is deleted after the next save
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pulse.integration.checkpoint.folders import (
    BestCheckpoint,
    CheckpointError,
    DamagedError,
    complete_checkpoints,
    read_best,
)
from megatron_pulse.integration.checkpoint.selection.pruning import set_removed, to_remove
from megatron_pulse.integration.checkpoint.selection.stored_checkpoints import (
    StoredCheckpoint,
    stored_in,
)

_LONGEST_REMOVAL_S = 600.0


@dataclass(frozen=True)
class KeepPolicy:
    """Checkpoints that stay: the last ``last``, multiples of ``every``, the best with ``best``.

    Without ``last`` and ``every`` all stay; with ``every`` alone, the last one. ``validation``
    describes the validation: losses of another are not compared.
    """

    last: int | None = None
    every: int | None = None
    best: bool = False
    validation: str = ""

    @property
    def num_last(self) -> int | None:
        """Number of last checkpoints that stay; None if all stay."""
        return 1 if self.last is None and self.every is not None else self.last


class Retention:
    """Policy applied to the folder of ``--save`` by rank 0; other ranks do nothing."""

    def __init__(self, save: Path | None, policy: KeepPolicy, rank: int) -> None:
        self._save = save if rank == 0 else None
        self._policy = policy
        self._losses: dict[int, float] = {}
        """Validation losses by step, of steps that may still be saved."""
        self._saved: int | None = None
        self._evaluated: float | None = None
        self._best: BestCheckpoint | None = None
        self._removal: threading.Thread | None = None
        if self._save is not None and policy.best:
            try:
                self._best = read_best(self._save)
            except DamagedError as error:
                _say(f"warning: {error}; the best checkpoint so far is unknown")
        if self._best is not None and self._best.validation != policy.validation:
            _say(
                f"step {self._best.step} was the best checkpoint by another validation "
                f"({self._best.validation}, now {policy.validation}): the best is sought anew"
            )
            self._best = None

    def noting_loss(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an ``evaluate`` that returns its losses on all ranks."""
        if not self._policy.best:
            return evaluate

        def run(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            self._evaluated = float(result[0]["loss"]) if result[0] else None
            return result

        return run

    def noting_step(self, evaluate_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's ``evaluate_and_print_results``, which knows the step."""

        def run(
            prefix: Any, forward: Any, data: Any, model: Any, iteration: int, *rest: Any, **kw: Any
        ) -> Any:
            self._evaluated = None
            result = evaluate_step(prefix, forward, data, model, iteration, *rest, **kw)
            if self._evaluated is not None:
                self._losses[iteration] = self._evaluated
                if iteration == self._saved:  # the last step is saved before its evaluation
                    self._record_best(iteration)
            return result

        return run

    def apply(self, step: int) -> None:
        """Record and remove after all ranks have ended the checkpoint of ``step``."""
        self._saved = step
        self._record_best(step)
        self._losses = {one: loss for one, loss in self._losses.items() if one >= step}
        if self._save is None or self._policy.num_last is None:
            return
        self.join()
        try:
            chosen = self._chosen(self._save, step, self._policy.num_last)
        except (CheckpointError, OSError) as error:
            _say(f"warning: {error}; no checkpoint is removed")
            return
        renamed = []
        for one in chosen:
            try:
                renamed.append(set_removed(one))
            except OSError as error:
                _say(f"warning: {one.folder} cannot be removed: {error.strerror}")
        if renamed:
            gone = ", ".join(str(one.step) for one in chosen if one.step is not None)
            _say(f"removing checkpoints of steps {gone}" if gone else "ending a removal")
            self._removal = threading.Thread(
                target=_delete, args=(renamed,), name="removal", daemon=True
            )
            self._removal.start()

    def join(self) -> None:
        """Wait for the deletion of removed checkpoints."""
        if self._removal is None:
            return
        self._removal.join(_LONGEST_REMOVAL_S)
        if self._removal.is_alive():
            _say("warning: removed checkpoints are still being deleted")
        self._removal = None

    def _chosen(self, save: Path, step: int, num_last: int) -> list[StoredCheckpoint]:
        """Checkpoints to remove: none, unless the files of ``step`` have the saved sizes."""
        stored = [one for one in stored_in(save, is_held=True) if (one.step or 0) <= step]
        steps = [one for one in stored if one.step is not None and not one.faults]
        if not steps or steps[-1].step != step:
            return []
        staying = {one.folder for one in steps[-num_last:]}
        return to_remove(stored, staying, self._policy.every)

    def _record_best(self, step: int) -> None:
        if self._save is None or step not in self._losses:
            return
        complete = complete_checkpoints(self._save)
        if step not in complete:  # a non-persistent checkpoint is elsewhere
            return
        loss, best = self._losses[step], self._best
        if best is not None and (best.step == step or best.step not in complete):
            best = None  # overwritten, or removed by hand
        if math.isfinite(loss) and (best is None or loss < best.validation_loss):
            self._best = BestCheckpoint(step, loss, self._policy.validation)
            self._best.write(self._save)
            _say(f"best checkpoint: step {step}, validation loss {loss:.6g}")


def _delete(folders: Sequence[Path]) -> None:
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            _say(f"warning: {folder} cannot be removed: {error.strerror}")


def _say(text: str) -> None:
    print(text, flush=True)
