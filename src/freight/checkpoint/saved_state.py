"""Saved state of a run: tensors through torch.distributed.checkpoint, everything else as JSON.

    checkpoints/step-000500/    __0_0.distcp ...   tensors under their names, with global shapes
                                .metadata          where each tensor lies
                                meta.json          step, what the caller adds, numbers and texts of the state
                                COMPLETE           sizes and checksums, written last
    checkpoints/latest          link to the newest

Names and shapes know no layout, so any layout loads what any other saved. An asynchronous save copies the tensors to
host memory first (as many bytes as this rank's state has) and writes them in a thread. Each of several ranks writes its
shards; their collectives go over a group of their own, which is what makes them safe beside a training step. One
process needs none.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from freight.checkpoint.completeness import MARKER, is_complete, mark_complete, verify
from freight.checkpoint.state_metadata import StateReader
from freight.checkpoint.tensor_files import listed, read_json
from freight.checkpoint.whole_folder import unfinished_folders, whole_folder
from freight.errors import CheckpointError

META = "meta.json"
LATEST = "latest"
STEP = re.compile(r"step-(\d+)")
STATE_VALUES = (bool, int, float, str, type(None))

T = TypeVar("T")


class PendingSave:
    """A save that may still be running.

    Args:
        path: Where the saved state will stand.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def wait(self) -> None:
        """Return when the saved state is on disk.

        Raises:
            CheckpointError: It could not be written; earlier ones are untouched.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def run(self, write: Callable[[], None]) -> None:
        """Write in a thread; an error is kept for `wait`."""

        def body() -> None:
            try:
                write()
            except CheckpointError as error:
                self._error = error

        self._thread = threading.Thread(target=body, name=_thread_name(self.path.parent))
        self._thread.start()


def save(
    directory: str | Path,
    step: int,
    state: dict[str, Any],
    meta: dict[str, Any],
    *,
    asynchronous: bool = False,
    group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Write `step-{step}` into a directory.

    Args:
        directory: The run's checkpoints.
        step: Optimizer steps done.
        state: Nested dicts and lists of tensors, DTensors, numbers and texts; each tensor once.
        meta: What JSON can hold, given back by `load`.
        asynchronous: Copy the tensors now and write them in a thread.
        group: Ranks that save together, a gloo group that nothing else uses; None = this process alone.

    Returns:
        The pending save; `wait` raises what went wrong in the thread. A save of the same directory that is still
        running is waited for first.

    Raises:
        CheckpointError: Writing failed; earlier saved states are untouched.
    """
    directory = Path(directory)
    _wait_for_running_save(directory)
    tensors, values = _flatten(state)
    pending = PendingSave(directory / f"step-{step:06d}")
    text = json.dumps({"step": step, "meta": meta, "values": values}, indent=1)
    if not asynchronous:
        _write(pending.path, step, tensors, text, group)
        return pending
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    pending.run(lambda: _write(pending.path, step, copies, text, group))
    return pending


def load(path: str | Path, state: dict[str, Any], *, verified: bool = False) -> dict[str, Any]:
    """Fill `state` in place from a saved state, bit for bit.

    Args:
        path: A `step-...` folder, or `latest`.
        state: As it was saved, or some of its top-level sections; tensors are filled, numbers and texts replaced.
        verified: The caller has just called `verify` or `newest_good`.

    Returns:
        The `meta` that was saved.

    Raises:
        CheckpointError: The saved state is damaged, or lacks, exceeds or contradicts what `state` asks for.
    """
    path = Path(path)
    if not verified:
        verify(path)
    saved = read_json(path / META)
    tensors, _ = _flatten(state)
    reader = StateReader(path)
    _check_tensors(path, state, tensors, reader.tensors())
    try:
        _quietly(lambda: state_dict_loader.load(tensors, storage_reader=reader, no_dist=True))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"`{path}` cannot be read: {_reason(error)}.") from None
    _replace_values(path, state, saved["values"])
    return saved["meta"]


def newest_good(directory: str | Path, warn: Callable[[str], None]) -> Path | None:
    """The newest saved state that verifies, or None; every newer one that does not is named in a warning."""
    directory = Path(directory)
    for leftover in unfinished_folders(directory):
        warn(f"`{leftover}` is left from an interrupted save and is ignored.")
    for path in reversed(_steps(directory)):
        try:
            verify(path)
        except CheckpointError as error:
            warn(f"{error} Looking for an older checkpoint.")
        else:
            return path
    return None


def has_steps(directory: str | Path) -> bool:
    """Whether there is any saved state, whole or not."""
    return bool(_steps(Path(directory)))


def set_aside_after(directory: str | Path, step: int) -> list[Path]:
    """Rename saved states behind a step to `abandoned-...`: a run that goes on from there must not lose to them.

    Returns:
        Their new paths.
    """
    moved = []
    for path in _steps(Path(directory)):
        if int(path.name.removeprefix("step-")) > step:
            target = path.with_name(f"abandoned-{path.name}")
            number = 1
            while target.exists():
                number += 1
                target = path.with_name(f"abandoned-{path.name}-{number}")
            path.rename(target)
            moved.append(target)
    return moved


def prune(directory: str | Path, keep: int) -> list[Path]:
    """Delete all saved states older than the newest `keep` complete ones, and return what was deleted."""
    steps = _steps(Path(directory))
    complete = [path for path in steps if is_complete(path)]
    if len(complete) < keep:
        return []
    old = steps[: steps.index(complete[-keep])]
    for path in old:
        # The marker goes first: what a crash leaves of the folder is then no saved state.
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return old


def _write(path: Path, step: int, tensors: dict[str, Tensor], meta: str, group: dist.ProcessGroup | None) -> None:
    """Write the folder; on several ranks the first one opens and closes it."""
    try:
        if group is None:
            with _saved_folder(path) as folder:
                writer = FileSystemWriter(folder, sync_files=False)
                _quietly(lambda: state_dict_saver.save(tensors, storage_writer=writer, no_dist=True))
                _complete(folder, meta)
        else:
            _write_together(path, tensors, meta, group)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"step {step} could not be saved to `{path.parent}`: {_reason(error)}. Earlier checkpoints are untouched."
        ) from error


def _write_together(path: Path, tensors: dict[str, Tensor], meta: str, group: dist.ProcessGroup) -> None:
    """What every rank of a group does; a fault of one is a fault of all."""
    with ExitStack() as stack:

        def begin() -> Path:
            return stack.enter_context(_saved_folder(path))

        def end(folder: Path) -> None:
            _complete(folder, meta)
            stack.close()

        folder = _on_first(group, begin)
        writer = FileSystemWriter(folder, sync_files=False)
        state_dict_saver.save(tensors, storage_writer=writer, process_group=group)
        _on_first(group, lambda: end(folder))


def _on_first(group: dist.ProcessGroup, function: Callable[[], T]) -> T:
    """What a function gives on the first rank of a group, on all of them; what it raises, too."""
    answer: list[Any] = [None, None]
    if group.rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:
            answer[1] = error
    dist.broadcast_object_list(answer, group_src=0, group=group)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


@contextmanager
def _saved_folder(path: Path) -> Iterator[Path]:
    """A folder that becomes the newest saved state when the block ends without an error."""
    for leftover in unfinished_folders(path.parent):
        shutil.rmtree(leftover, ignore_errors=True)
    with whole_folder(path) as folder:
        yield folder
    link = path.parent / f".{LATEST}"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    link.replace(path.parent / LATEST)


def _complete(folder: Path, meta: str) -> None:
    (folder / META).write_text(meta, encoding="utf-8")
    mark_complete(folder)


def _steps(directory: Path) -> list[Path]:
    """Folders of saved states, complete or not, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _thread_name(directory: Path) -> str:
    return f"save to {directory.absolute()}"


def _wait_for_running_save(directory: Path) -> None:
    for thread in threading.enumerate():
        if thread.name == _thread_name(directory):
            thread.join()


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any, Any]]:
    """`(dotted path, container, key, value)` of everything that is not a container."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, value in items:
        here = (*path, str(key))
        if isinstance(value, Mapping | list | tuple):
            yield from _leaves(value, here)
        else:
            yield ".".join(here), node, key, value


def _flatten(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, _, _, value in _leaves(state):
        if name in tensors or name in values:
            raise CheckpointError(f"two entries of the state are called `{name}`.")
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, STATE_VALUES):
            values[name] = value
        else:
            raise CheckpointError(f"`{name}` cannot be saved: {type(value).__name__} is neither a tensor nor JSON.")
    return tensors, values


def _check_tensors(
    path: Path, state: Mapping[str, Any], wanted: Mapping[str, Tensor], saved: Mapping[str, tuple[Any, torch.dtype]]
) -> None:
    if missing := sorted(wanted.keys() - saved.keys()):
        raise CheckpointError(f"`{path}` lacks {listed(missing)} ({len(missing)} missing): it is of another model.")
    sections = tuple(f"{section}." for section in state)
    surplus = sorted(name for name in saved.keys() - wanted.keys() if name.startswith(sections))
    if surplus:
        raise CheckpointError(f"`{path}` has {listed(surplus)} ({len(surplus)} left over): it is of another model.")
    for name, tensor in wanted.items():
        shape, dtype = saved[name]
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise CheckpointError(
                f"`{path}`: `{name}` was saved as {list(shape)} {dtype}; the model has {list(tensor.shape)} "
                f"{tensor.dtype}."
            )


def _replace_values(path: Path, state: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, container, key, value in list(_leaves(state)):
        if isinstance(value, Tensor):
            continue
        if name not in values:
            raise CheckpointError(f"`{path / META}` lacks `{name}`: it is of another model.")
        container[key] = values[name]


def _quietly(call: Callable[[], Any]) -> None:
    """Without the notice that torch.distributed is not used, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        call()


def _reason(error: BaseException) -> str:
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).splitlines()[0].rstrip(".")
