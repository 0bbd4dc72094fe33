"""The training loop: step, log, evaluate, save, until the plan is done or somebody asks to stop.

One loop serves pretraining and fine-tuning; what differs is the configuration. Whatever ends a run (the last step, a
signal, an error) leaves a run folder that says so and a report that shows it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from freight.checkpoint import saved_state
from freight.config.schema import Config
from freight.data.load.loader import StepData, evaluation_batches, joined_state
from freight.errors import FreightError
from freight.parallel.data import free_gathered
from freight.train.begin import begin
from freight.train.console import evaluation_line, gibibytes, step_line
from freight.train.evaluate import Evaluation, evaluate
from freight.train.flops import device_peak, peak_memory_bytes, trained_part
from freight.train.launch import World, launched
from freight.train.profile import StepProfiler
from freight.train.rank_failures import announce, failure_of, one_line
from freight.train.resume import CONFIG_FILE, Counters, RunFailed, Saver, restore
from freight.train.run_record import RunRecord
from freight.train.schedule import learning_rate_factor
from freight.train.setup import Prepared, ProgressCallback, Trainable, build
from freight.train.signals import StopSignals
from freight.train.step import StepResult, train_step
from freight.train.throughput import Throughput
from freight.train.warm_up import warm_up

StepDisplay = Callable[[int, int | None, Mapping[str, float], float | None], None]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Args:
        exit_code: 0 done, 1 failed, 130 or 143 interrupted and saved.
        steps: Global batches consumed, those before a resume included.
        run_dir: The run folder.
        message: One line: how it ended, or how to resume.
        loss: Of the last step; nan if there was none.
        evaluation: The last evaluation.
    """

    exit_code: int
    steps: int
    run_dir: Path
    message: str
    loss: float
    evaluation: Evaluation | None


def train(
    config: Config,
    *,
    name: str,
    resume: str | None = None,
    overwrite: bool = False,
    report_line: Callable[[str], None],
    show_step: StepDisplay | None = None,
    progress: ProgressCallback | None = None,
) -> TrainResult:
    """Train as a configuration says.

    Args:
        config: Checked.
        name: The run folder is `runs/<name>` unless `log.dir` says otherwise.
        resume: `auto`, or a checkpoint's path.
        overwrite: Replace a run that the folder holds.
        report_line: Gets every line for the user.
        show_step: Gets every logged step; by default it is written as a line.
        progress: For preparation and evaluation.

    Raises:
        FreightError: Bad input, before training starts or while it reads data.
    """
    run_dir = Path(config.log.dir or f"runs/{name}").expanduser()
    checkpoints = Path(config.checkpoint.dir).expanduser() if config.checkpoint.dir else run_dir / "checkpoints"
    with launched(config.parallel.timeout_seconds) as world:
        try:
            prepared, checkpoint = begin(
                config, world, run_dir, checkpoints, resume, report_line, progress, overwrite=overwrite
            )
        except FreightError as error:
            announce(error, "before the first step")
            raise
        except Exception as error:
            if world.size == 1:
                raise
            raise RunFailed(failure_of(error, "before the first step")) from error
        record = RunRecord(run_dir, report_line, prepared.total_steps, mute=not world.first)
        loop = None
        try:
            with build(prepared, world) as trainable:
                loop = Loop(prepared, trainable, world, record, checkpoints, show_step, progress)
                if checkpoint is not None:
                    loop.resume(checkpoint)
                with StopSignals() as signals:
                    return loop.run(signals)
        except BaseException as error:
            step = 0 if loop is None else loop.step
            message = failure_of(error, f"at step {step + 1}")
            _leave(record, message, step)
            if world.size == 1 or not isinstance(error, Exception):
                raise
            raise RunFailed(message) from error


class Loop:
    """A run from its present position to its end.

    Args:
        prepared: What to train on.
        trainable: What to train.
        world: The ranks of the run.
        record: Where it tells what happens.
        checkpoints: Where saved state goes.
        show_step: Gets every logged step; by default it is written as a line.
        progress: For evaluation.
    """

    def __init__(
        self,
        prepared: Prepared,
        trainable: Trainable,
        world: World,
        record: RunRecord,
        checkpoints: Path,
        show_step: StepDisplay | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        config = prepared.config
        self._config = config
        self._prepared = prepared
        self._trainable = trainable
        self._world = world
        self._record = record
        self._checkpoints = checkpoints
        self._show_step = show_step or (lambda *step: record.say(step_line(*step)))
        self._progress = progress if world.first else None
        self._loader = prepared.loader()
        self._counters = Counters()
        self._saver = Saver(
            checkpoints,
            config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            warn=self._warn,
            group=world.saving_group(),
        )
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        self._throughput = Throughput(
            prepared.arch,
            device_peak(trainable.device, dtype),
            trainable.device,
            trained_part(prepared.arch, config.adapter, prepared.plan.adapted),
            ranks=world.size,
            context_ranks=prepared.plan.execution.context_ranks,
        )
        self._resumed_step: int | None = None
        self._loss = math.nan
        self._evaluation: Evaluation | None = None
        self._evaluated_step: int | None = None

    @property
    def step(self) -> int:
        """Global batches consumed."""
        return self._counters.step

    def resume(self, checkpoint: Path) -> None:
        """Go to where a checkpoint stands; later ones of the run, which it now leaves, are set aside.

        Raises:
            CheckpointError: Damaged, or of another model.
            DataError: The data have changed.
        """
        model, optimizer = self._trainable.model, self._trainable.optimizer
        architecture = self._prepared.arch.model_dump(mode="json")
        self._counters, state = restore(checkpoint, model, optimizer, architecture, self._config)
        for notice in self._loader.load_state_dict(state, allow_changed=self._config.data.allow_changed):
            self._warn(notice)
        self._resumed_step = self._saver.saved_step = self._counters.step
        for abandoned in self._world.on_first(
            lambda: saved_state.set_aside_after(self._checkpoints, self._counters.step)
        ):
            self._warn(f"{abandoned} holds a later step of another course of this run; it is kept and no longer used")
        self._record.say(f"resumed from {checkpoint} after step {self._counters.step}")

    def run(self, signals: StopSignals) -> TrainResult:
        """Train until the last step or a signal."""
        self._record.open(self._config, self._resumed_step)
        self._record.status("running", self._counters.step)
        try:
            if self._prepared.plan.execution.stream is not None:
                warm_up(self._trainable)
            # A signal stops a run without its evaluation; one that was made is not repeated after a resume.
            if self._world.on_first(lambda: self._record.evaluated(self._counters.step)):
                self._evaluated_step = self._counters.step
            if self._evaluation_due():
                self._evaluate()
            profile = self._config.log.profile if self._world.first else None
            run_dir, device = self._record.run_dir, self._trainable.device
            with StepProfiler(profile, run_dir, device, self._counters.step) as profiler:
                self._steps(signals, profiler)
            return self._end(signals)
        except (torch.OutOfMemoryError, MemoryError) as error:
            peak = gibibytes(peak_memory_bytes(self._trainable.device))
            raise RunFailed(
                f"out of memory in step {self._counters.step + 1}, peak {peak}: {one_line(error)} {self._smaller()}"
            ) from error
        finally:
            self._record.close()

    def _steps(self, signals: StopSignals, profiler: StepProfiler) -> None:
        checkpoint, total = self._config.checkpoint, self._prepared.total_steps
        began = time.perf_counter()
        for data in self._loader:
            waited = time.perf_counter() - began
            result, rate = self._train(data)
            profiler.step()
            signals.agree(self._world)
            self._throughput.add(data, result.num_tokens, time.perf_counter() - began, waited)
            step = self._counters.step
            last = step >= total or signals.requested is not None
            if step % self._config.log.every_steps == 0 or last or not result.updated:
                self._log_step(data, result, rate)
            self._refuse_endless_skipping()
            if signals.requested is not None:
                break
            if self._evaluation_due():
                self._evaluate()
            if checkpoint.every_steps is not None and step % checkpoint.every_steps == 0:
                self._save()
            self._record.report_now_and_then(step)
            began = time.perf_counter()

    def _train(self, data: StepData) -> tuple[StepResult, float]:
        train, counters = self._config.train, self._counters
        rate = train.optimizer.lr * learning_rate_factor(counters.updates, self._prepared.total_steps, train.schedule)
        result = train_step(
            self._trainable.model,
            self._trainable.optimizer,
            [self._trainable.execution.deal(batch) for batch in data.microbatches],
            data.num_targets,
            num_tokens=data.num_tokens,
            learning_rate=rate,
            grad_clip=train.grad_clip,
            mesh=self._trainable.mesh,
            device=self._trainable.device,
        )
        counters.step += 1
        counters.tokens += result.num_tokens
        counters.updates += result.updated
        counters.nonfinite = 0 if result.updated or not result.num_targets else counters.nonfinite + 1
        self._loss = result.loss
        return result, rate

    def _log_step(self, data: StepData, result: StepResult, rate: float) -> None:
        counters, total = self._counters, self._prepared.total_steps
        metrics = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": rate,
            "train/epoch": data.epoch,
            "train/tokens": counters.tokens,
            "train/targets": result.num_targets,
            **self._throughput.metrics(),
            **self._trainable.execution.metrics(data.microbatches),
        }
        self._record.metrics(counters.step, metrics)
        if self._world.first:
            self._show_step(counters.step, total, metrics, self._throughput.eta_seconds(total - counters.step))
        if not result.num_targets:
            self._warn(f"step {counters.step}: the global batch has no label; nothing was updated")
        elif not result.updated:
            self._warn(f"step {counters.step}: gradient norm {result.grad_norm}; nothing was updated")

    def _refuse_endless_skipping(self) -> None:
        limit = self._config.train.max_nonfinite_steps
        if self._counters.nonfinite >= limit:
            raise RunFailed(
                f"gradients were not finite in {limit} steps in a row, the last one {self._counters.step} "
                "(`train.max_nonfinite_steps`). Lower the learning rate, or look at the data of these steps."
            )

    def _evaluation_due(self) -> bool:
        every = self._config.train.evaluate_every_steps
        return every is not None and self._counters.step % every == 0

    def _evaluate(self) -> None:
        rows, step, total = self._prepared.validation, self._counters.step, self._prepared.total_steps
        if rows is None or self._evaluated_step == step:
            return
        model, plan = self._trainable.model, self._prepared.plan
        # Validation may be packed to another size than training.
        tokens = max(1, plan.micro_batch_tokens // rows.pack_size) * rows.pack_size
        data_rank, context_rank = divmod(self._world.rank, plan.execution.context_ranks)
        evaluation = evaluate(
            model,
            evaluation_batches(rows, tokens, data_ranks=plan.data_ranks, rank=data_rank, pad_rows=False),
            deal=self._trainable.execution.deal,
            gather=self._world.gather,
            counts_documents=context_rank == 0,
            source_of=rows.source_of,
            chunk_tokens=self._config.train.loss_chunk_tokens,
            progress=self._progress,
            total_documents=rows.num_documents,
        )
        free_gathered(model)
        self._evaluation, self._evaluated_step = evaluation, step
        self._record.metrics(step, evaluation.metrics())
        self._record.say(evaluation_line(step, total, evaluation.loss, evaluation.tokens))

    def _save(self) -> None:
        if self._saver.saved_step == self._counters.step:
            return
        meta = {
            "architecture": self._prepared.arch.model_dump(mode="json"),
            "config": self._config.model_dump(mode="json", by_alias=True, exclude_unset=True),
        }
        loader = joined_state(
            self._world.gather(self._loader.state_dict())[:: self._prepared.plan.execution.context_ranks]
        )
        self._saver.save(self._trainable.model, self._trainable.optimizer, self._counters, loader, meta)

    def _save_for_good(self) -> None:
        """Save, and come back only when it is on disk: nothing follows that could try again.

        Raises:
            RunFailed: Two attempts failed.
        """
        while self._saver.saved_step != self._counters.step or self._saver.pending:
            self._save()
            self._saver.finish()

    def _end(self, signals: StopSignals) -> TrainResult:
        """Save, evaluate, and say how it ended."""
        step, total = self._counters.step, self._prepared.total_steps
        if signals.requested is not None and step < total:
            self._save_for_good()
            message = (
                f"stopped by {signals.requested.name} after step {step} of {total}, saved; continue with: "
                f"freight train {self._record.run_dir / CONFIG_FILE} --resume auto"
            )
            self._record.status("interrupted", step, message)
            exit_code = signals.exit_code
        else:
            if self._config.checkpoint.save_final:
                self._save_for_good()
            self._saver.finish()
            self._evaluate()
            message = f"done after step {step}{self._next_command()}"
            self._record.status("finished", step, message)
            exit_code = 0
        self._record.report()
        self._record.say(message)
        return TrainResult(exit_code, step, self._record.run_dir, message, self._loss, self._evaluation)

    def _smaller(self) -> str:
        """What takes less memory and leaves results as they are."""
        plan = self._prepared.plan
        if plan.rows_per_microbatch > 1:
            return "Lower train.micro_batch_tokens (a multiple of the pack size); the global batch stays the same."
        if plan.execution.stream is not None:
            chunk = plan.execution.stream.chunk_tokens
            return f"Lower fpdt.chunk_tokens (now {chunk}), or send more to a tier with fpdt.offload and fpdt.kv."
        if plan.execution.runner == "recompute":
            return "Set fpdt instead of recompute: layers are then streamed chunk by chunk."
        return "Set recompute.granularity to full, or fpdt: layers are then streamed chunk by chunk."

    def _next_command(self) -> str:
        """What people do with a model that was saved."""
        run_dir = self._record.run_dir
        return f"; next: freight export {run_dir} {run_dir}-model" if self._config.checkpoint.save_final else ""

    def _warn(self, message: str) -> None:
        self._record.warn(message, self._counters.step)


def _leave(record: RunRecord, message: str, step: int) -> None:
    """Leave a folder that tells what happened; nothing here may hide the error that is on its way."""
    try:
        record.status("failed", step, message)
        record.report()
    except Exception as error:
        record.warn(f"the report could not be written: {one_line(error)}")
