"""From sources to tokenised documents, once: the result is cached under a key of everything that decides it.

Runs before any process group exists, so no collective ever waits for it; of several processes on a machine one builds
and the others wait for its files. With `cache_dir: null` documents stay in memory and nothing but rejects is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freight.config.schema import DataConfig, Source
from freight.data.documents import Documents
from freight.data.read.rejects import rejects_name
from freight.data.read.sources import SourceFiles, resolve_sources
from freight.data.render.template import ChatTemplate, load_chat_template
from freight.data.tokens.build_folder import building_folder, one_builder, publish, read_state, write_state
from freight.data.tokens.cache_key import cache_key, hash_files
from freight.data.tokens.document_builder import DocumentBuilder, Job, Progress
from freight.data.tokens.token_store import ArrowSink, MemorySink, StoredDocuments
from freight.data.tokens.worker_pool import WorkerDeath
from freight.errors import DataError, FreightError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenise(
    sources: str | Sequence[str | Source],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    output_dir: Path | None = None,
    progress: Progress | None = None,
    processes: int | None = None,
) -> Documents:
    """Tokenise sources, or open them from the cache.

    Args:
        sources: `data.train` or `data.validation`.
        config: Formats, rules and limits.
        tokenizer: From `load_tokenizer`.
        vocab_size: Rows of the model's embedding; every id must be below.
        output_dir: Gets `rejects-<source>.jsonl` for sources that have rejects; created if needed.
        progress: Told of bytes done and in all.
        processes: How many tokenise; the result is the same for any number. None = as many as there are cores, at most
            8, but only one for small input.

    Returns:
        Documents in the order of the sources. `metadata` also has `records_read`, `records_used`, `supervised_share`,
        `length_quantiles`, `straddling_tokens`, `trailing_unsupervised`, `documents_cut`, `tokens_cut`,
        `tokens_dropped`, `ignored_keys`, `notices` and `warnings`.

    Raises:
        DataError: Anything that makes a record, and so the run, unusable.
    """
    resolved = resolve_sources(sources, config)
    template = template_of(tokenizer, config)
    report = progress or (lambda done, total, what: None)
    job = Job(resolved, config, tokenizer, template, vocab_size, report, processes)
    if config.cache_dir is None:
        return build_in_memory(job, output_dir)
    return build_cached(job, Path(config.cache_dir).expanduser(), output_dir)


def template_of(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> ChatTemplate | None:
    """The chat template of a run, if there is one.

    Raises:
        DataError: Delimiters beside a template that needs none.
    """
    template = load_chat_template(tokenizer, config.chat_template, config.template_kwargs)
    if template and template.has_generation and config.assistant_start:
        raise DataError("data.assistant_start has no effect: the template marks generation itself; leave it out")
    return template


def build_in_memory(job: Job, output_dir: Path | None) -> Documents:
    """Tokenise without a cache; rejects go where they belong at once."""
    place_rejects(job.sources, None, output_dir)
    sink = MemorySink()
    builder = DocumentBuilder(job, sink, output_dir)
    builder.run()
    return sink.documents(builder.books.files, builder.metadata(hash_files(job.sources)))


def build_cached(job: Job, cache: Path, output_dir: Path | None) -> Documents:
    """Open the cache's entry, after making it if there is none.

    Raises:
        DataError: The cache cannot be written, or the data cannot be used.
    """
    hashes = hash_files(job.sources, cache, job.progress)
    key = cache_key(job.sources, hashes, job.config, job.tokenizer, job.template, job.vocab_size)
    final, folder = cache / "tokenized" / key, building_folder(cache, key)
    documents = open_stored(final)
    if documents is None:
        try:
            with one_builder(folder, lambda pid: job.progress(0, 0, f"waiting for process {pid} to tokenise")):
                documents = open_stored(final)  # made while this process waited
                if documents is None:
                    documents = build_entry(job, folder, final, hashes, output_dir)
        except OSError as error:
            raise DataError(
                f"data.cache_dir {cache}: cannot be written ({error.strerror or error}); set data.cache_dir elsewhere"
            ) from None
    place_rejects(job.sources, final, output_dir)
    return documents


def build_entry(
    job: Job, folder: Path, final: Path, hashes: dict[Path, str], output_dir: Path | None
) -> StoredDocuments:
    """Tokenise into a folder of its own, behind the shards that an interrupted build finished there, and rename it.

    Raises:
        DataError: The data cannot be used; nothing is left in the cache then.
    """
    sink, state = open_building(folder, job.vocab_size)
    builder = DocumentBuilder(job, sink, folder, lambda state: write_state(folder, state))
    try:
        builder.run(state)
        sink.finish(builder.books.files, builder.metadata(hashes))
        publish(folder, final)
    except WorkerDeath:
        sink.abort()  # finished shards stay for the next start
        raise
    except FreightError:
        sink.abort()
        place_rejects(job.sources, folder, output_dir)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        sink.abort()  # so they do after a fault of ours or Ctrl-C
        raise
    return StoredDocuments(final)


def open_building(folder: Path, vocab_size: int) -> tuple[ArrowSink, dict[str, Any] | None]:
    """The folder to build in, with what an interrupted build left if that is usable, else empty."""
    state = read_state(folder)
    if state is not None:
        try:
            return ArrowSink(folder, vocab_size, state["shards"]), state
        except (OSError, ValueError, KeyError, TypeError):
            pass
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return ArrowSink(folder, vocab_size), None


def open_stored(folder: Path) -> StoredDocuments | None:
    """The entry, if it is there and whole; a damaged one is removed."""
    if not folder.exists():
        return None
    try:
        return StoredDocuments(folder)
    except (OSError, ValueError, KeyError):
        shutil.rmtree(folder, ignore_errors=True)
        return None


def place_rejects(sources: list[SourceFiles], origin: Path | None, folder: Path | None) -> None:
    """Bring rejects files from a cache entry to the output folder, and remove those of an earlier run."""
    if folder is None:
        return
    for name in (rejects_name(source.name) for source in sources):
        (folder / name).unlink(missing_ok=True)
        if origin is not None and (origin / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin / name, folder / name)


def remarks(metadata: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What a user should hear of the records that were read.

    Args:
        metadata: Of the documents, or of rows made of them; a packed file has none of it.

    Returns:
        Notices, among them that every record is accounted for and why some are left out, and warnings.
    """
    notices = list(metadata.get("notices", ()))
    if "records_read" in metadata:
        left_out = metadata["records_read"] - metadata["records_used"]
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in metadata["skipped"].items() if count)
        notices.append(
            f"records: {metadata['records_read']:,} read = {metadata['records_used']:,} used + {left_out:,} left out"
            f"{f' ({reasons})' if reasons else ''}"
        )
    return notices, list(metadata.get("warnings", ()))
