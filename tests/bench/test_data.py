"""The benchmark of tokenising: both sides do the same work, and memory is that of the whole tree of processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freight.bench.data import run, summary, varied, write_chats
from freight.bench.data_sides import datasets_side, freight_side
from freight.bench.process_tree import PeakMemory, resident_bytes, tree_bytes
from freight.errors import ConfigError
from tests.data.small_tokenizer import small_tokenizer

TAKES = "import sys, time; block = bytearray(64 << 20); print(flush=True); sys.stdin.read()"


def test_both_sides_make_the_same_tokens_of_the_same_file(tmp_path):
    file, tokenizer = tmp_path / "chats.jsonl", tmp_path / "tokenizer"
    write_chats(file, 40_000)
    small_tokenizer().save_pretrained(tokenizer)
    ours = freight_side(str(file), str(tokenizer), str(tmp_path / "ours"), processes=1, pack=True)
    theirs = datasets_side(str(file), str(tokenizer), str(tmp_path / "theirs"), processes=0)
    assert 40_000 <= file.stat().st_size < 60_000
    assert ours["documents"] == theirs["documents"] == len(file.read_text().splitlines())
    assert ours["tokens"] == theirs["tokens"] and ours["rows"] >= ours["tokens"] / 8192


def test_rounds_of_the_same_conversations_differ():
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "name": "x"}
    rounds = [varied(record, number) for number in range(3)]
    assert len({json.dumps(each) for each in rounds}) == 3
    assert all(each["messages"][1] == record["messages"][1] and set(each) == {"messages"} for each in rounds)


def test_children_count_in_the_memory_of_a_tree():
    child = subprocess.Popen([sys.executable, "-c", TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout.readline()
        with PeakMemory(child.pid) as memory:
            deadline = time.monotonic() + 30
            while not memory.peak_bytes and time.monotonic() < deadline:
                time.sleep(0.01)
        alone = resident_bytes(Path("/proc/self"))
        assert memory.peak_bytes > 60 << 20
        assert tree_bytes(os.getpid()) > 0.9 * alone + (60 << 20)
        child.stdin.close()
    assert tree_bytes(child.pid) == 0


def test_the_ratio_is_theirs_over_ours():
    ours = {"documents": 4, "tokens": 100, "peak_resident_bytes": 5, "pack_seconds": 1.0}
    runs = {
        "freight": [{**ours, "seconds": seconds} for seconds in (1.0, 2.0, 9.0)],
        "datasets": [{**ours, "seconds": seconds, "peak_resident_bytes": 7} for seconds in (3.0, 6.0, 5.0)],
    }
    found = summary(runs, {"tokens": 30, "seconds": 0.5}, 2)
    assert found["ratio_over_datasets_map"] == 2.5 and found["tokens_per_second"] == 50
    assert found["tokens_per_second_per_core"] == 60 and found["same_tokens"] is True
    assert found["peak_resident_bytes"] == 5 and found["datasets_peak_resident_bytes"] == 7
    assert "ratio_over_datasets_map" not in summary(
        {"freight": runs["freight"], "datasets": []}, ours | runs["freight"][0], None
    )


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"megabyte.*megabytes"):
        run({"megabyte": 1})
