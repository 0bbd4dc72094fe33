"""Where a run stands, and how it goes on: claiming a run folder, saving, finding and restoring saved state.

Everything that decides the future of a run is in four places: parameters, optimizer moments, the loader's position
and a handful of counters. Nothing random has a state of its own: initialisation is keyed by name, dropout by position,
order by (seed, epoch). So a resumed run is bit-equal to one that never stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW

from freight.checkpoint import saved_state
from freight.checkpoint.frozen_weights import check_frozen, frozen_digests
from freight.config.schema import AdapterConfig, Config
from freight.errors import CheckpointError, ConfigError, FreightError
from freight.train.metrics import METRICS_FILE
from freight.train.optimizer import optimizer_state
from freight.train.report import REPORT_FILE
from freight.train.run_folder import DATA_FILE, PLAN_FILE, STATUS_FILE, WARNINGS_FILE

MAX_FAILED_SAVES = 2
CONFIG_FILE = "config.yaml"
RUN_FILES = (
    CONFIG_FILE,
    DATA_FILE,
    METRICS_FILE,
    PLAN_FILE,
    REPORT_FILE,
    STATUS_FILE,
    WARNINGS_FILE,
    "environment.json",
)
RUN_FOLDERS = ("tensorboard", "profile", "wandb")


class RunFailed(FreightError):
    """Training cannot go on; nobody's input is wrong."""


@dataclass
class Counters:
    """A run's position.

    Args:
        step: Global batches consumed.
        updates: Optimizer updates applied: the schedule's position. Behind `step` by the steps skipped.
        nonfinite: Steps skipped in a row for a non-finite gradient norm.
        tokens: Real tokens consumed.
    """

    step: int = 0
    updates: int = 0
    nonfinite: int = 0
    tokens: int = 0


def refuse_held_folder(run_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """Protect what lies in the run folder; looks only, so that it can come before all slow work.

    Raises:
        ConfigError: It holds another run and neither resuming nor overwriting was asked for; both were; or it holds a
            configuration that is no run's.
    """
    if resume and overwrite:
        raise ConfigError("--resume continues a run and --overwrite replaces it. Give one of them.")
    held = (run_dir / STATUS_FILE).exists()
    if held and not resume and not overwrite:
        raise ConfigError(
            f"`log.dir` {run_dir} already holds a run. Continue it with --resume auto, replace it with --overwrite, "
            "or choose another log.dir."
        )
    if not held and (run_dir / CONFIG_FILE).exists():
        raise ConfigError(
            f"`log.dir` {run_dir} holds a {CONFIG_FILE} that is no run's and would be replaced. Choose another log.dir."
        )


def claim_run_folder(run_dir: Path, checkpoints: Path, *, overwrite: bool) -> None:
    """Make the folder if it is missing; with `overwrite`, remove the old run's files and nothing else."""
    if overwrite:
        for name in RUN_FILES:
            (run_dir / name).unlink(missing_ok=True)
        for folder in (*(run_dir / name for name in RUN_FOLDERS), *checkpoints.glob("step-*")):
            shutil.rmtree(folder, ignore_errors=True)
        (checkpoints / "latest").unlink(missing_ok=True)
    run_dir.mkdir(parents=True, exist_ok=True)


def find_checkpoint(resume: str, directory: Path, warn: Callable[[str], None]) -> Path | None:
    """The saved state to continue from.

    Args:
        resume: `auto`, or the path of one checkpoint.
        directory: The run's checkpoints.
        warn: Told about damaged ones that `auto` passes over.

    Returns:
        None if `auto` finds nothing: the run starts from the beginning.

    Raises:
        CheckpointError: The given path is no checkpoint, or is damaged; or `auto` finds only damaged ones.
    """
    if resume == "auto":
        newest = saved_state.newest_good(directory, warn)
        if newest is None and saved_state.has_steps(directory):
            raise CheckpointError(
                f"no checkpoint in {directory} is whole, so there is nothing to resume. Start again with --overwrite."
            )
        return newest
    path = Path(resume).expanduser()
    saved_state.verify(path)
    return path


def state_of(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """The tensors to save, by canonical names, without what is frozen; loading fills these very tensors."""
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    return {"model": parameters, "optimizer": optimizer_state(model, optimizer)}


def restore(
    path: Path, model: nn.Module, optimizer: AdamW, architecture: dict[str, Any], config: Config
) -> tuple[Counters, Any]:
    """Fill model and optimizer from saved state.

    Returns:
        The counters, and the loader's state.

    Raises:
        CheckpointError: Damaged, of another architecture or adapter, or trained on another base.
    """
    meta = saved_state.load(path, {})
    _refuse_change(path, "model", meta["architecture"], architecture)
    saved = meta.get("config", {}).get("adapter")
    if (saved is None) != (config.adapter is None):
        raise CheckpointError(
            f"`{path}` was trained {'without' if saved is None else 'with'} `adapter`. "
            "Resume with the run's own config.yaml, or start a new run."
        )
    if config.adapter is not None:
        before = AdapterConfig.model_validate(saved).model_dump(mode="json", exclude={"dropout"})
        _refuse_change(path, "adapter", before, config.adapter.model_dump(mode="json", exclude={"dropout"}))
    check_frozen(frozen_digests(model), meta.get("frozen", {}), config.model.hf or "train.seed")
    saved_state.load(path, state_of(model, optimizer), verified=True)
    return Counters(**meta["counters"]), meta["loader"]


def _refuse_change(path: Path, section: str, saved: dict[str, Any], present: dict[str, Any]) -> None:
    for key, now in present.items():
        if saved.get(key) != now:
            raise CheckpointError(
                f"`{path}` is of another model: `{section}.{key}` was {saved.get(key)}, is {now}. "
                "Resume with the run's own config.yaml, or start a new run."
            )


class Saver:
    """Saves a run, keeps the newest few, and lives through one full disk.

    Args:
        directory: For checkpoints.
        keep: How many stay.
        asynchronous: Write while training goes on.
        warn: Told when a save failed.
        group: Ranks that write together; None = this process alone.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        *,
        asynchronous: bool,
        warn: Callable[[str], None],
        group: ProcessGroup | None = None,
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._asynchronous = asynchronous
        self._warn = warn
        self._group = group
        self._pending: saved_state.PendingSave | None = None
        self._failures = 0
        self.saved_step: int | None = None

    @property
    def pending(self) -> bool:
        """Whether a save is still being written."""
        return self._pending is not None

    def save(
        self, model: nn.Module, optimizer: AdamW, counters: Counters, loader: dict[str, Any], meta: dict[str, Any]
    ) -> None:
        """Save the present state, after the save before it is complete.

        Raises:
            RunFailed: The second failure in a row; the newest complete checkpoint stays.
        """
        self.finish()
        meta = {**meta, "counters": asdict(counters), "loader": loader, "frozen": frozen_digests(model)}
        self.saved_step = counters.step
        try:
            self._pending = saved_state.save(
                self._directory,
                counters.step,
                state_of(model, optimizer),
                meta,
                asynchronous=self._asynchronous,
                group=self._group,
            )
        except (OSError, CheckpointError) as error:
            self._failed(error)

    def finish(self) -> None:
        """Wait for a save that is being written, then drop checkpoints beyond `keep`.

        Raises:
            RunFailed: As `save`.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.wait()
        except (OSError, CheckpointError) as error:
            self._failed(error)
            return
        self._failures = 0
        if self._group is None or self._group.rank() == 0:
            saved_state.prune(self._directory, self._keep)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self.saved_step = None
        if self._failures >= MAX_FAILED_SAVES:
            raise RunFailed(
                f"saving failed {self._failures} times in a row: {error}. Make room under {self._directory}, then "
                "continue with --resume auto."
            ) from error
        self._warn(f"saving failed: {error}. The run goes on; the checkpoint before it stays.")
