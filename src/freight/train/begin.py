"""The beginning of a run: find everything that can be wrong, then claim the run folder and describe the run in it.

The folder is claimed last, when all ranks know that the run can start, so that a fault costs nobody an older run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

from freight.config.schema import Config
from freight.data.tokens.tokenise import remarks
from freight.planner.words import plan_words
from freight.train.data_facts import data_facts
from freight.train.launch import World, environment
from freight.train.resume import CONFIG_FILE, claim_run_folder, find_checkpoint, refuse_held_folder
from freight.train.run_folder import DATA_FILE, RunStatus, add_warning, write_json, write_plan, write_status
from freight.train.setup import Prepared, ProgressCallback, prepare


def begin(
    config: Config,
    world: World,
    run_dir: Path,
    checkpoints: Path,
    resume: str | None,
    report_line: Callable[[str], None],
    progress: ProgressCallback | None,
    *,
    overwrite: bool,
) -> tuple[Prepared, Path | None]:
    """Read and check everything but the weights' contents, then claim the run folder.

    Args:
        config: Checked by itself.
        world: The ranks of the run.
        run_dir: The run folder.
        checkpoints: Where the run's saved state is.
        resume: `auto`, or a checkpoint's path.
        report_line: Gets every line for the user, on the first rank.
        progress: For tokenising and packing.
        overwrite: Replace a run that the folder holds.

    Returns:
        What to train on, and the saved state to go on from; None = from the beginning.

    Raises:
        FreightError: The same on all ranks.

    **Communication**: two broadcasts from the first rank, which alone looks at the run folder.
    """
    warnings: list[str] = []

    def tell(line: str) -> None:
        if world.first:
            report_line(line)

    def warn(message: str) -> None:
        warnings.append(message)
        tell(f"warning: {message}")

    def look() -> Path | None:
        refuse_held_folder(run_dir, resume=resume is not None, overwrite=overwrite)
        return find_checkpoint(resume, checkpoints, warn) if resume is not None else None

    def claim() -> None:
        claim_run_folder(run_dir, checkpoints, overwrite=overwrite)
        for message in warnings:
            add_warning(run_dir, message)
        _describe_run(prepared, run_dir)

    checkpoint = world.on_first(look)
    prepared = prepare(config, world, run_dir, progress if world.first else None)
    for rows in filter(None, (prepared.rows, prepared.validation)):
        notices, concerns = remarks(rows.metadata)
        for notice in notices:
            tell(notice)
        for concern in concerns:
            warn(concern)
    world.on_first(claim)
    for line in plan_words(prepared.plan):
        tell(line)
    return prepared, checkpoint


def _describe_run(prepared: Prepared, run_dir: Path) -> None:
    """What is known before the first step: configuration, machine, plan, data."""
    values = prepared.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    values["log"] = values.get("log", {}) | {"dir": str(run_dir)}
    (run_dir / CONFIG_FILE).write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    write_status(run_dir, RunStatus("running", total_steps=prepared.total_steps))
    write_json(run_dir / "environment.json", environment())
    write_plan(run_dir, plan_words(prepared.plan))
    indexed = prepared.rows.indexed()
    write_json(run_dir / DATA_FILE, {} if indexed is None else data_facts(indexed))
