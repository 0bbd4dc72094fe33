"""Large input: any number of processes, interrupted and resumed, one builder at a time, bounded memory."""

import fcntl
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from freight.config.schema import DataConfig, Source
from freight.data.read.sources import resolve_sources
from freight.data.render.encode import is_checked
from freight.data.tokens import cache_key, document_builder, record_batches
from freight.data.tokens.batch_encoder import BatchEncoder
from freight.data.tokens.build_folder import building_folder, one_builder
from freight.data.tokens.cache_key import hash_files
from freight.data.tokens.tokenise import tokenise
from freight.data.tokens.worker_pool import WorkerDeath
from freight.errors import DataError
from tests.data.small_tokenizer import REWRITING, small_tokenizer
from tests.data.tokens.test_tokenise import chat, entries, run, same, write

SKIP = {"on_bad_record": "skip", "max_skipped_fraction": 1.0, "truncation": "drop"}


def mixed(path, count):
    """Records good and bad: text, tool calls without a name, other shapes, lines that are no JSON, some too long."""
    rows = []
    for number in range(count):
        kind = number % 11
        record = chat(f"question {number}", f"answer {number}")
        if kind == 3:
            record["extra"] = number
        elif kind == 5:
            record["messages"][1]["content"] = "long" * 100
        elif kind == 7:
            record["messages"][0]["role"] = "nobody"
        elif kind == 9:
            record["messages"].append({"role": "user", "content": "thanks"})
        rows.append("{broken" if kind == 8 else record)
    return write(path, *rows)


def rejects(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("rejects-*"))}


def test_any_number_of_processes_makes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(record_batches, "BATCH_RECORDS", 7)
    tokenizer = small_tokenizer(merges=(("Ċ", "a"),))
    sources = (
        Source(path=mixed(tmp_path / "a.jsonl", 150)),
        Source(path=mixed(tmp_path / "b.jsonl", 90), max_records=40),
    )
    results = [
        run(sources, tokenizer, tmp_path / f"out{processes}", processes=processes, **SKIP) for processes in (1, 2)
    ]
    same(*results)
    assert rejects(tmp_path / "out1") == rejects(tmp_path / "out2") != {}
    facts = results[0].metadata
    assert facts["straddling_tokens"] and facts["trailing_unsupervised"] and facts["ignored_keys"] == {"extra": 18}
    assert facts["skipped"] == {"too_long": 18, "unknown_role": 16, "invalid_json": 16} and facts["warnings"]
    assert facts["records_read"] == 190 == facts["records_used"] + sum(facts["skipped"].values())


def test_a_wrong_template_stops_the_run_in_any_number_of_processes(tmp_path):
    reasoned = [*chat("a", "<think>x</think>b")["messages"], *chat("c", "d")["messages"]]
    source = write(tmp_path / "r.jsonl", *[{"messages": reasoned}, chat("a", "b"), {"messages": reasoned}] * 400)
    words = []
    for processes in (1, 2):
        with pytest.raises(DataError, match="667 of the first 1,000 records are unstable_template") as caught:
            run(source, small_tokenizer(REWRITING), processes=processes, **SKIP)
        words.append(str(caught.value))
    assert words[0] == words[1]


def test_the_first_thousand_records_are_checked_and_then_one_in_a_hundred():
    assert all(is_checked(number) for number in range(1000))
    assert [number for number in range(1000, 1400) if is_checked(number)] == [1000, 1100, 1200, 1300]


def test_small_input_starts_no_processes_and_large_input_does(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(document_builder, "usable_processes", lambda limit: started.append(limit) or 1)
    source = write(tmp_path / "a.jsonl", chat("a", "b"))
    run(source)
    assert not started
    monkeypatch.setattr(document_builder, "POOL_BYTES", 10)
    run(source)
    assert started == [8]


class Stop(BaseException):
    """Stands for Ctrl-C."""


def test_an_interrupted_build_goes_on_behind_its_last_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(record_batches, "BATCH_RECORDS", 5)
    monkeypatch.setattr(document_builder, "SHARD_BYTES", 2500)
    encoded = []
    encode = BatchEncoder.__call__
    monkeypatch.setattr(
        BatchEncoder, "__call__", lambda self, task: encoded.append(len(task.records)) or encode(self, task)
    )
    sources = (
        Source(path=mixed(tmp_path / "a.jsonl", 100), fields={"tools": "extra_tools"}, max_records=70),
        Source(path=mixed(tmp_path / "b.jsonl", 40)),
    )
    first = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(chat("x", "y") | {"extra_tools": []}), *first[1:]]))
    straight = run(sources, output_dir=tmp_path / "straight", cache_dir=str(tmp_path / "cache0"), **SKIP)
    total, calls = sum(encoded), len(encoded)
    assert total == 110
    for stop in (1, 4, calls // 2 + 1, calls - 3, calls - 1):
        encoded.clear()
        cache = tmp_path / f"cache{stop}"

        def interrupt(done, of, what, stop=stop):
            if what.startswith("tokenising") and len(encoded) == stop:
                raise Stop

        with pytest.raises(Stop):
            run(sources, cache_dir=str(cache), progress=interrupt, **SKIP)
        before = sum(encoded)
        encoded.clear()
        resumed = run(sources, output_dir=tmp_path / f"out{stop}", cache_dir=str(cache), **SKIP)
        same(resumed, straight)
        assert rejects(tmp_path / f"out{stop}") == rejects(tmp_path / "straight") != {}
        assert list((cache / "building").iterdir()) == []
        assert sum(encoded) >= total - before
        if stop > calls // 2:
            assert sum(encoded) < total - before // 3, "finished shards are not made again"


def test_a_dead_worker_leaves_finished_shards_for_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(record_batches, "BATCH_RECORDS", 5)
    monkeypatch.setattr(document_builder, "SHARD_BYTES", 1000)
    source, cache = mixed(tmp_path / "a.jsonl", 40), tmp_path / "cache"
    encode = BatchEncoder.__call__

    def die(self, task):
        if task.first >= 30:
            raise WorkerDeath("a process of tokenising was ended by SIGKILL")
        return encode(self, task)

    monkeypatch.setattr(BatchEncoder, "__call__", die)
    with pytest.raises(WorkerDeath):
        run(source, cache_dir=str(cache), **SKIP)
    first = []
    monkeypatch.setattr(BatchEncoder, "__call__", lambda self, task: first.append(task.first) or encode(self, task))
    resumed = run(source, cache_dir=str(cache), **SKIP)
    assert first[0] >= 20
    same(resumed, run(source, **SKIP))


def test_packed_lines_are_tokenised_and_resumed_as_plain_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(record_batches, "BATCH_RECORDS", 5)
    monkeypatch.setattr(document_builder, "SHARD_BYTES", 1)
    plain = mixed(tmp_path / "a.jsonl", 60)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))

    def interrupt(done, of, what):
        if what.startswith("tokenising") and interrupts.append(done) is None and len(interrupts) == 6:
            raise Stop

    interrupts, cache = [], str(tmp_path / "cache")
    with pytest.raises(Stop):
        run(str(packed), cache_dir=cache, progress=interrupt, **SKIP)
    resumed, straight = run(str(packed), cache_dir=cache, **SKIP), run(plain, **SKIP)
    assert resumed.fingerprint == straight.fingerprint and len(interrupts) == 6
    assert resumed.metadata["skipped"] == straight.metadata["skipped"]
    assert [resumed.origin(index).rpartition(":")[2] for index in range(len(resumed))] == [
        straight.origin(index).rpartition(":")[2] for index in range(len(straight))
    ]


def test_a_build_that_left_damage_behind_starts_over(tmp_path, monkeypatch):
    monkeypatch.setattr(record_batches, "BATCH_RECORDS", 5)
    monkeypatch.setattr(document_builder, "SHARD_BYTES", 1000)
    source, cache = mixed(tmp_path / "a.jsonl", 40), tmp_path / "cache"

    def interrupt(done, of, what):
        if done > 2500 and what.startswith("tokenising"):
            raise Stop

    with pytest.raises(Stop):
        run(source, cache_dir=str(cache), progress=interrupt, **SKIP)
    (folder,) = (path for path in (cache / "building").iterdir() if path.is_dir())
    (folder / "documents-00000.arrow").write_bytes(b"ARROW1")
    same(run(source, cache_dir=str(cache), **SKIP), run(source, **SKIP))


def test_one_process_builds_and_the_other_waits(tmp_path):
    source, cache = write(tmp_path / "a.jsonl", chat("a", "b")), tmp_path / "cache"
    run(source, cache_dir=str(cache))
    (key,) = entries(cache)
    folder, final = building_folder(cache, key), cache / "tokenized" / key
    hidden, words, made = tmp_path / "hidden", [], []
    final.rename(hidden)
    with one_builder(folder, words.append):
        other = threading.Thread(
            target=lambda: made.append(
                run(source, cache_dir=str(cache), progress=lambda done, total, what: words.append(what))
            )
        )
        other.start()
        while f"waiting for process {os.getpid()} to tokenise" not in words:
            time.sleep(0.01)
        hidden.rename(final)
    other.join()
    assert len(made[0]) == 1 and not any(word.startswith("tokenising") for word in words)
    assert list(folder.parent.iterdir()) == []


def test_a_lock_left_by_a_dead_process_holds_nobody_up(tmp_path):
    folder = building_folder(tmp_path, "key")
    path = folder.with_name(f"{folder.name}.lock")
    code = (
        "import sys, os; from pathlib import Path; from freight.data.tokens.build_folder import one_builder\n"
        "with one_builder(Path(sys.argv[1]), print): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == -9
    assert path.read_text().isdigit()
    with one_builder(folder, lambda pid: pytest.fail(f"waited for {pid}")):
        assert path.read_text() == str(os.getpid())
        with path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_files_that_did_not_change_are_not_hashed_again(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    write(path, chat("a", "b"))
    sources = resolve_sources(str(path), DataConfig(train=str(path), sequence_length=8))
    hashed = []
    real = cache_key.hash_file
    monkeypatch.setattr(cache_key, "hash_file", lambda path: hashed.append(path) or real(path))
    first = hash_files(sources, tmp_path / "cache")
    assert hash_files(sources, tmp_path / "cache") == first and len(hashed) == 2, "too fresh to be remembered"
    monkeypatch.setattr(cache_key, "SETTLED_NANOSECONDS", -(10**18))
    for _ in range(3):
        assert hash_files(sources, tmp_path / "cache") == first
    assert len(hashed) == 3
    stamp = path.stat()
    time.sleep(0.01)
    write(path, chat("a", "c"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert path.stat().st_size == stamp.st_size and path.stat().st_mtime_ns == stamp.st_mtime_ns
    assert hash_files(sources, tmp_path / "cache") != first
    (entry,) = (tmp_path / "cache" / "hashes").iterdir()
    entry.write_text("{")
    assert hash_files(sources, tmp_path / "cache") == hash_files(sources)


def padded(path, size):
    """A file of a size whose records are mostly a key that is not used: quick to tokenise, as large as any."""
    line = json.dumps(chat("a question", "an answer") | {"notes": "x" * 5000}) + "\n"
    with path.open("w") as file:
        for _ in range(size // len(line) + 1):
            file.write(line)
    return str(path)


GROWTH = """
import sys
from tests.data.tokens.test_tokenise_scale import growth
print(growth(sys.argv[1], sys.argv[2], sys.argv[3]))
"""


def growth(small, large, cache):
    """Bytes by which this process's peak grows when it tokenises a large file after a small one."""
    tokenizer = small_tokenizer()
    config = DataConfig(train=small, sequence_length=64, cache_dir=cache)
    tokenise(small, config, tokenizer, vocab_size=len(tokenizer), processes=1)
    before = peak_bytes()
    tokenise(large, config, tokenizer, vocab_size=len(tokenizer), processes=1)
    return peak_bytes() - before


def peak_bytes():
    """Most resident bytes so far; unlike `ru_maxrss`, not that of the process that started this one."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measured_growth(tmp_path, size):
    small, large = padded(tmp_path / "small.jsonl", 2 << 20), padded(tmp_path / "large.jsonl", size)
    command = [sys.executable, "-c", GROWTH, small, large, str(tmp_path / "cache")]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def test_memory_does_not_grow_with_the_file(tmp_path):
    assert measured_growth(tmp_path, 25 << 20) < 8 << 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_memory_does_not_grow_with_a_file_of_two_gibibytes(tmp_path):
    assert measured_growth(tmp_path, 2 << 30) < 64 << 20
