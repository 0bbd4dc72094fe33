"""The command line: the main job end to end, exit codes, and faults as lines, never as tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from freight import __version__
from freight.cli.main import app
from freight.config.keys import every_key
from freight.config.schema import Config
from tests.cli.tiny_files import chats, config, tokenizer

COMMANDS = (
    "check", "schema", "pack", "show", "train", "evaluate", "generate", "import", "export", "bench", "env", "demo",
    "verify"
)  # fmt: skip


def freight(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    # An exception here is a traceback for the user, unless it is the exit itself.
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run folder, made once."""
    folder = tmp_path_factory.mktemp("trained")
    result = freight("train", config(folder))
    assert result.exit_code == 0, result.output
    return folder / "run"


def test_every_command_has_help_with_an_example():
    for command in COMMANDS:
        result = freight(command, "--help")
        assert result.exit_code == 0
        assert f"Example: freight {command}" in result.output
    assert freight("--version").output == f"freight {__version__}\n"


def test_help_and_schema_do_not_wait_for_torch():
    code = (
        "import sys; from freight.cli.main import app\n"
        "try: app(['schema'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["additionalProperties"] is False


def test_faults_are_lines_on_stderr_and_the_exit_code_is_2(tmp_path):
    path = config(tmp_path, train={"grad_acum": 4, "steps": 0})
    result = subprocess.run(
        [sys.executable, "-m", "freight", "check", str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: `train.") for line in lines)


def test_check_says_what_a_config_means_and_prints_it_resolved(tmp_path):
    path = config(tmp_path)
    result = freight("check", path, "--data", "train.micro_batch_tokens=512")
    assert result.exit_code == 0, result.output
    assert "data: 12 documents" in result.output
    assert "a microbatch is 512 tokens" in result.output
    printed = freight("check", path, "train.steps=7", "--print-config").stdout
    assert yaml.safe_load(printed)["train"]["steps"] == 7
    assert "# grad_clip: 1.0" in printed


def test_the_main_job_end_to_end(trained, tmp_path):
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "report.html", "checkpoints"):
        assert (trained / name).exists(), name
    data = chats(tmp_path / "heldout.jsonl", 3)
    ours = json.loads(freight("evaluate", trained, "--data", data, "--json").stdout)
    exported = tmp_path / "exported"
    assert freight("export", trained, exported, "--dtype", "fp32").exit_code == 0
    again = json.loads(freight("evaluate", exported, "--data", data, "--json").stdout)
    assert again["tokens"] == ours["tokens"] > 0
    assert again["loss"] == pytest.approx(ours["loss"], abs=1e-6)
    imported = freight("import", exported, tmp_path / "imported")
    assert imported.exit_code == 0
    assert "llama, 1 layers, hidden 32" in imported.output
    first = freight("generate", trained, "--prompt", "a", "--max-tokens", "4", "--temperature", "1", "--seed", "3")
    second = freight("generate", exported, "--prompt", "a", "--max-tokens", "4", "--temperature", "1", "--seed", "3")
    assert first.exit_code == 0
    assert first.stdout == second.stdout


def test_keys_beside_hf_hold_for_evaluation_too(trained, tmp_path):
    exported = tmp_path / "exported"
    freight("export", trained, exported, "--dtype", "fp32")
    path = config(tmp_path, data={"validation": str(chats(tmp_path / "heldout.jsonl", 3))})
    raw = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(raw | {"model": {"hf": str(exported)}}))
    plain = json.loads(freight("evaluate", path, "--json").stdout)
    capped = json.loads(freight("evaluate", path, "model.final_softcap=0.001", "--json").stdout)
    assert capped["loss"] != pytest.approx(plain["loss"], abs=1e-3)
    (exported / "model.safetensors").unlink()
    bare = freight("evaluate", path)
    assert bare.exit_code == 2
    assert "has no weights" in bare.stderr


def test_a_run_is_not_overwritten_by_accident(trained):
    result = freight("train", trained / "config.yaml")
    assert result.exit_code == 2
    assert "already holds a run" in result.stderr
    resumed = freight("train", trained / "config.yaml", "train.steps=4", "--resume", "auto")
    assert resumed.exit_code == 0, resumed.output


def test_a_chat_is_continued(trained, tmp_path):
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    assert freight("generate", trained, "--chat", chat, "--max-tokens", "2").exit_code == 0
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}], "tools": 5}))
    refused = freight("generate", trained, "--chat", chat)
    assert refused.exit_code == 2
    assert "tools: expected a list of JSON schemas, got 5" in refused.stderr


def test_pack_show_and_inspect(tmp_path):
    path, out = config(tmp_path), tmp_path / "packed"
    result = freight("pack", path, "--output", out, "--pack-sizes", "128,256", "--json")
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)
    assert [report["pack_size"] for report in reports] == [128, 256]
    assert freight("pack", "--inspect", reports[0]["output"], "--row", "0").exit_code == 0
    shown = freight("show", path, "--record", "1").stdout
    assert "⟦1 1 <|im_end|>⟧" in shown
    trained = freight("check", path, f"data.packing={{file: {reports[1]['output']}}}", "--data")
    assert "packed file" in trained.output, trained.output


def test_an_npy_file_is_written_inspected_and_converted_back(tmp_path):
    """The loss mask's meaning is asked for; a file and its conversion hold the same rows."""
    path, out = config(tmp_path), tmp_path / "packed"
    written = freight("pack", path, "--output", out, "--format", "npy", "--npy-mask", "token", "--json")
    assert written.exit_code == 0, written.output
    (report,) = json.loads(written.stdout)
    npy = report["output"]
    assert npy.endswith(".npy")
    shown = freight("pack", "--inspect", npy, "--npy-mask", "token", "--pack-sizes", 256, "--row", "0")
    assert shown.exit_code == 0, shown.output
    asked = freight("pack", "--convert", npy, "--output", tmp_path / "rows.arrow")
    assert asked.exit_code == 2, asked.output
    assert "`--npy-mask` must be token or label; it is missing" in asked.stderr
    back = freight(
        "pack", "--convert", npy, "--output", tmp_path / "rows.arrow", "--npy-mask", "token", "--pack-sizes", 256
    )
    assert back.exit_code == 0, back.output
    again = freight("pack", "--inspect", tmp_path / "rows.arrow", "--row", "0")
    assert again.exit_code == 0, again.output
    assert shown.output.splitlines()[-1] == again.output.splitlines()[-1]


def test_a_config_json_alone_gives_random_weights(trained, tmp_path):
    exported, bare = tmp_path / "exported", tmp_path / "bare"
    freight("export", trained, exported)
    bare.mkdir()
    (bare / "config.json").write_text((exported / "config.json").read_text())
    result = freight("import", bare, tmp_path / "random")
    assert result.exit_code == 0, result.output
    assert "drawn from seed 0" in result.stderr
    assert (tmp_path / "random" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train", "nope.yaml"), "nope.yaml: no such file"),
        (("evaluate", "nope", "--data", "x"), "nope: no such file or folder"),
        (("generate", "nope", "--prompt", "x"), "nope: no such file or folder"),
        (("generate", "."), "exactly one of `--prompt` and `--chat` must be given; got neither"),
        (("generate", ".", "--chat", "nope.json"), "nope.json: no such file"),
        (("export", ".", "out"), "holds no model"),
        (("import", "broken.gguf", "out"), "broken.gguf"),
        (("import", "nope", "out"), "nope"),
        (("bench", "attention", "repeats=[1"), 'option "repeats=[1": the value is broken YAML'),
        (("bench", "atention"), "Did you mean `attention`?"),
        (("pack",), "CONFIG or DATA is missing"),
        (("pack", "x.jsonl", "--tokenizer", "tokenizer"), "`--pack-sizes` is missing"),
        (("pack", "x.jsonl", "--row", "0"), "`--row` has no effect without `--inspect`"),
        (("pack", "x.jsonl", "--tokenizer", "tokenizer", "--sequence-length", "0"), "`data.sequence_length` must be"),
        (
            ("pack", "x.jsonl", "--tokenizer", "tokenizer", "--pack-sizes", "1", "--sequence-length", "10"),
            "`data.packing.pack_size` must be",
        ),
        (
            ("pack", "x.jsonl", "--tokenizer", "tokenizer", "--pack-sizes", "8", "--document-multiple", "0"),
            "`data.packing.document_multiple` must be",
        ),
        (("pack", "x.jsonl", "--pack-sizes", "a,b"), "`--pack-sizes` must be integers"),
        (("pack", "nope.jsonl", "--pack-sizes", "64", "--tokenizer", "tokenizer"), "nope.jsonl"),
        (("pack", "empty.jsonl", "--pack-sizes", "64", "--tokenizer", "tokenizer"), "empty"),
        (("show", "x.jsonl"), "`--tokenizer` is missing"),
        (("show", "x.jsonl", "--record", "-1"), "`--record` must be at least 0"),
        (("pack", "--inspect", "broken.gguf"), "broken.gguf"),
    ],
)
def test_bad_input_is_named_with_exit_code_2(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    tokenizer(tmp_path)
    Path("broken.gguf").write_bytes(b"GGUF\x03\x00")
    Path("empty.jsonl").touch()
    result = freight(*arguments)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr, result.stderr
    assert all(line.startswith("error: ") for line in result.stderr.splitlines()), result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("arguments", [("frobnicate",), ("train",), ("train", "a.yaml", "--overwite")])
def test_wrong_usage_is_exit_code_2(arguments):
    assert freight(*arguments).exit_code == 2


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    command = f"{sys.executable} -m freight schema | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert result.stderr == ""


KEYS = ["model", "data", "train", "model.rope", "train.schedule", *(".".join(map(str, k)) for k in every_key(Config))]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([0.5, float("inf"), float("nan"), 1e30, 10**30]),
    st.text(max_size=6),
    st.sampled_from(["none", "split", "text", "messages", "wsd", "linear", "math", "${train.seed}", "${", "???"]),
    st.lists(st.one_of(st.integers(-1, 3), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(-1, 3), max_size=2),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=8)), VALUES, max_size=4))
def test_no_mutation_of_a_config_gives_a_traceback(fuzzed, changes):
    folder, raw = fuzzed
    path = folder / "fuzzed.yaml"
    path.write_text(yaml.safe_dump({**raw, **changes}, allow_unicode=False))
    result = freight("check", path, "--print-config")
    assert result.exit_code in (0, 2)
    if result.exit_code == 2:
        assert "Traceback" not in result.output
        assert result.stderr.strip()
    else:
        assert yaml.safe_load(result.stdout) is not None


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_no_text_gives_a_traceback(fuzzed, text):
    folder, _ = fuzzed
    path = folder / "text.yaml"
    path.write_text(text, encoding="utf-8")
    assert freight("check", path, "--print-config").exit_code == 2


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzed")
    return folder, yaml.safe_load(config(folder).read_text())
