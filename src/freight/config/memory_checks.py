"""What must hold between `parallel`, `recompute`, `offload` and `fpdt`, as far as keys alone tell; see `checks.py`."""

from __future__ import annotations

from collections.abc import Iterator

from freight.config.data_checks import two
from freight.config.keys import shown
from freight.config.schema import Config


def memory_faults(config: Config) -> Iterator[str]:
    """Faults of how a run is spread over ranks and kept in memory."""
    yield from _parallel(config)
    yield from _offload(config)
    yield from _fpdt(config)


def _parallel(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.context == 1:
        for key in ("context_method", "ulysses"):
            if key in parallel.model_fields_set and getattr(parallel, key) not in (None, "auto"):
                yield f"`parallel.{key}` has no effect with `parallel.context` 1. Remove it, or use more context ranks."
        if "context" in config.overlap.model_fields_set:
            yield "`overlap.context` has no effect with `parallel.context` 1. Remove it, or use more context ranks."
    tokens = config.train.micro_batch_tokens
    if tokens is not None and tokens % parallel.context:
        yield (
            f"`train.micro_batch_tokens` must be a multiple of `parallel.context` = {parallel.context}; got {tokens}. "
            f"Use {nearest(tokens, parallel.context)}."
        )


def _offload(config: Config) -> Iterator[str]:
    offload, fpdt = config.offload, config.fpdt
    kept = offload.layer_inputs
    if fpdt is not None and kept != "none":
        yield (
            f"`offload.layer_inputs` is {kept} while `fpdt` is set; the stream keeps layer inputs itself. "
            f"Remove it and set `fpdt.offload: {kept}`."
        )
    elif kept != "none" and config.recompute is None:
        yield (
            f"`offload.layer_inputs` {kept} has no effect without `recompute`. Remove it, or set "
            "`recompute.granularity: full`."
        )
    elif kept == "none" and "prefetch_groups" in offload.model_fields_set:
        yield (
            f"`offload.prefetch_groups` {offload.prefetch_groups} has no effect with `offload.layer_inputs: none`. "
            "Remove it."
        )
    on_disk = "fpdt.offload" if fpdt is not None and fpdt.offload == "disk" else "offload.layer_inputs"
    if (kept == "disk" or (fpdt is not None and fpdt.offload == "disk")) and not offload.directory:
        yield f"`{on_disk}: disk` needs `offload.directory`; it is {shown(offload.directory)}. Set a local path."
    elif offload.directory is not None and kept != "disk" and (fpdt is None or fpdt.offload != "disk"):
        yield f"`offload.directory` {offload.directory} has no effect: nothing goes to disk. Remove it."


def _fpdt(config: Config) -> Iterator[str]:
    fpdt, context = config.fpdt, config.parallel.context
    if fpdt is None:
        return
    if config.recompute is not None:
        yield (
            f"`recompute.granularity` is {config.recompute.granularity} while `fpdt` is set; the stream already "
            "recomputes every block. Remove `recompute`."
        )
    if config.adapter is not None and config.adapter.use_dora:
        yield (
            "`adapter.use_dora` cannot run under `fpdt`: its lengths are sharded apart from their block. Set it to "
            "false, or use `recompute` instead of `fpdt`."
        )
    if "loss_chunk_tokens" in config.train.model_fields_set:
        yield (
            f"`train.loss_chunk_tokens` {config.train.loss_chunk_tokens} has no effect while `fpdt` is set. Remove it, "
            "or set `fpdt.loss_chunk_tokens`."
        )
    if fpdt.kv == "offload" and fpdt.offload == "none":
        yield "`fpdt.kv: offload` needs a tier; `fpdt.offload` is none. Use `host` or `disk`."
    chunk = fpdt.chunk_tokens
    if isinstance(chunk, int) and chunk < 1:
        yield f"`fpdt.chunk_tokens` must be at least 1; got {chunk}. Remove `fpdt` to switch streaming off."
        return
    if isinstance(chunk, int) and chunk % context:
        yield (
            f"`fpdt.chunk_tokens` must be a multiple of `parallel.context` = {context}; got {chunk}. "
            f"Use {nearest(chunk, context)}."
        )
    for key in ("ffn_chunk_tokens", "loss_chunk_tokens"):
        part = getattr(fpdt, key)
        if not isinstance(part, int):
            continue
        if part < 1:
            yield f"`fpdt.{key}` must be at least 1; got {part}. Use null for a whole chunk."
        elif part % context:
            yield (
                f"`fpdt.{key}` must be a multiple of `parallel.context` = {context}; got {part}. "
                f"Use {nearest(part, context)}."
            )
        elif isinstance(chunk, int) and part > chunk:
            yield larger_than_chunk(key, part, chunk)


def larger_than_chunk(key: str, part: int, chunk: int) -> str:
    """What to say of a key of `fpdt` that is to be a part of a chunk."""
    return f"`fpdt.{key}` {part} is larger than `fpdt.chunk_tokens` {chunk}. Use a value up to {chunk}, `auto` or null."


def nearest(number: int, unit: int) -> str:
    """The multiples of a unit on both sides of a number: `65536 or 65544`."""
    return two(number - number % unit, number - number % unit + unit)
