"""Loading: every fault at once, in the house form; overrides; YAML that is not what it seems."""

from __future__ import annotations

import re

import pytest

from freight.config.load import load_config
from freight.config.yaml_text import to_yaml
from freight.errors import ConfigError
from tests.config.example import example, put, write


def faults_of(folder, raw, *overrides, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, raw), overrides, **options)
    return list(caught.value.faults)


def test_a_complete_config_loads(tmp_path):
    config = load_config(write(tmp_path, example(tmp_path)))
    assert config.model.preset == "debug"
    assert config.data.packing.pack_size == 128
    assert config.train.optimizer.lr == 1e-3
    assert config.train.precision == "bf16"


def test_options_that_do_nothing_are_all_named_in_one_list(tmp_path):
    """Options that do nothing: each an error before any process starts, with key, value and nearest name."""
    raw = example(tmp_path)
    raw["train"] |= {"grad_acum": 4, "global_batch_size": 0, "micro_batch_tokens": 300}
    raw["recompute"] = {"granularity": "selectve"}
    raw["data"]["packing"]["algorithm"] = "first_fit_shufle"
    raw["attention"] = {"backend": "flsh"}
    faults = faults_of(tmp_path, raw)
    for key, value, fix in (
        ("train.grad_acum", "4", "train.grad_clip"),
        ("train.global_batch_size", "0", "at least 1"),
        ("train.micro_batch_tokens", "300", "Use 256 or 384"),
        ("recompute.granularity", "selectve", "must be `full`"),
        ("data.packing.algorithm", "first_fit_shufle", "Did you mean `first_fit_shuffle`?"),
        ("attention.backend", "flsh", "Did you mean `flash`?"),
    ):
        assert [f for f in faults if f.startswith(f"`{key}`") and value in f and fix in f], (key, faults)
    assert len(faults) == 6


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("train.steps", "10", '`train.steps` must be an integer of at least 1, or null; got "10".'),
        ("train.seed", True, "`train.seed` must be an integer; got true."),
        ("train.seed", 1.5, "`train.seed` must be an integer; got 1.5."),
        ("train.optimizer.lr", 0, "`train.optimizer.lr` must be a number above 0; got 0."),
        ("train.optimizer.betas", [0.9], "`train.optimizer.betas` must be a list of 2 (a number); got [0.9]."),
        (
            "train.grad_clip",
            -1,
            "`train.grad_clip` must be a number above 0, or null; got -1. Use null to leave it off.",
        ),
        ("train.compile", "yes please", '`train.compile` must be true or false; got "yes please".'),
        ("train", [], "`train` must be a mapping; got []."),
        ("data.train", [{"pth": 3}], "`data.train[0].path` is missing. Set it to text."),
        ("data.train", [5], "`data.train[0]` must be text or a mapping; got 5."),
        ("data.fields", {"a": 1}, "`data.fields.a` must be text; got 1."),
        ("model.attention_bias", "x", '`model.attention_bias` must be true or false or `qkv`, or null; got "x".'),
        ("train.precision", "fp8", "`train.precision: fp8` is not available in this version of Freight; remove it."),
        ("model.moe", {"num_experts": 8}, "`model.moe` (mixture of experts) is not available"),
        ("adapter", {"rnak": 8}, "`adapter.rnak` is not a key of Freight; got 8. Did you mean `adapter.rank`?"),
        ("adapter", {"type": "prefix-tuning"}, "`adapter.type` prefix-tuning puts virtual tokens in front of a row"),
        ("adapter", {"type": "lorra"}, '`adapter.type` must be `lora`; got "lorra". Did you mean `lora`?'),
        ("adapter", {"rank": 0}, "`adapter.rank` must be an integer of at least 1; got 0."),
        ("adapter", {"dropout": 1.0}, "`adapter.dropout` must be a number of at least 0 and below 1; got 1.0."),
        ("train.sequence_length", 64, "Did you mean `data.sequence_length`?"),
        ("modle.preset", "debug", "Did you mean `model`?"),
        ("checkpoint.asynch", True, "Did you mean `checkpoint.async`?"),
        ("model.preset", "lama3-8b", '`model.preset` "lama3-8b" does not exist. Did you mean `llama3-8b`?'),
    ],
)
def test_a_fault_names_key_value_and_fix(tmp_path, key, value, sentence):
    faults = faults_of(tmp_path, put(example(tmp_path), key, value))
    assert any(sentence in fault for fault in faults), faults


def test_a_value_of_several_possible_types_gives_one_fault_per_key(tmp_path):
    faults = faults_of(tmp_path, put(example(tmp_path), "data.train", [{"pth": 3}, 5]))
    assert [fault.split()[0] for fault in faults] == ["`data.train[0].path`", "`data.train[0].pth`", "`data.train[1]`"]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite(tmp_path, value):
    faults = faults_of(tmp_path, put(example(tmp_path), "train.optimizer.lr", value))
    assert len(faults) == 1
    assert "`train.optimizer.lr` must be a number above 0" in faults[0]


@pytest.mark.parametrize("clip", [0, -1, float("nan")])
def test_gradient_clipping_is_off_by_null_only(tmp_path, clip):
    """Grad norm counts wrongly, part (d): 0, -1 and NaN are config errors."""
    assert (
        "`train.grad_clip` must be a number above 0, or null"
        in faults_of(tmp_path, put(example(tmp_path), "train.grad_clip", clip))[0]
    )
    assert load_config(write(tmp_path, put(example(tmp_path), "train.grad_clip", None))).train.grad_clip is None


def test_pydantic_never_speaks(tmp_path):
    raw = example(tmp_path)
    raw["train"] |= {"steps": "x", "optimizer": {"lr": [], "nme": 1}, "schedule": 3}
    raw["data"] = {"train": [1, {"path": 2, "weight": 0}], "fields": [], "sequence_length": None}
    raw["model"] = {"num_layers": 2.5, "rope": {"theta": "x", "scaling": {"type": "ntk"}}}
    text = "\n".join(faults_of(tmp_path, raw))
    assert not re.search(r"Input should|Field required|pydantic|type=|validation error", text)
    assert "`model.rope.scaling.type` must be `linear`" in text
    assert "`train.optimizer.nme` is not a key of Freight" in text


def test_missing_sections_name_the_keys_they_lack(tmp_path):
    faults = faults_of(tmp_path, {"model": {"preset": "debug"}})
    text = "\n".join(faults)
    for key in ("data.train", "data.sequence_length", "train.optimizer.lr"):
        assert f"`{key}` is missing" in text
    assert "exactly one of `train.steps` and `train.epochs`" in text
    assert not any("stand" in fault for fault in faults)


def test_faults_of_the_rest_are_found_beside_a_missing_key(tmp_path):
    raw = example(tmp_path)
    del raw["train"]["optimizer"]
    raw["train"]["epochs"] = 1
    faults = faults_of(tmp_path, raw)
    assert [f[:27] for f in faults] == ["`train.optimizer.lr` is mis", "exactly one of `train.steps"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "empty. A config has the sections"),
        ("- a\n", "holds a list, not a mapping"),
        ("hello", "holds one value, not a mapping"),
        ("a: [1\nb: 2", "broken YAML"),
        ("a: &x [*x]\nb: *y", "broken YAML"),
        ("train: {steps: 1}\ntrain: {steps: 2}", "key `train` stands twice"),
        ("train:\n  steps: 1\n  steps: 2", ":3: key `steps` stands twice. Keep one."),
        ("a: \x00", "broken YAML"),
        ("!!python/object/apply:os.system [ls]", "broken YAML"),
        ("a: ${oc.env:HOME}", "does not read the environment"),
        ("a: ${b", "interpolation in the config fails"),
        ("a: ${nothing.here}", "interpolation in the config fails"),
        ("1: x", "key 1 is not text"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path, text, sentence):
    faults = faults_of(tmp_path, text)
    assert any(sentence in fault for fault in faults), faults
    assert not any("\n" in fault for fault in faults)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"nope.yaml: no such file\. Give the path"):
        load_config(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(binary)


def test_named_files_must_exist_unless_told_otherwise(tmp_path):
    raw = put(example(tmp_path), "data.validation", [{"path": "/no/such.jsonl"}])
    (fault,) = faults_of(tmp_path, raw)
    assert fault.startswith('`data.validation[0].path` "/no/such.jsonl" does not exist.')
    load_config(write(tmp_path, raw), check_files=False)


def test_overrides_win_and_later_ones_win_over_earlier(tmp_path):
    path = write(tmp_path, example(tmp_path))
    config = load_config(path, ["train.steps=5", "train.optimizer.lr=2e-5", "train.steps=7", "model.rope.theta=5e5"])
    assert config.train.steps == 7
    assert config.train.optimizer.lr == 2e-5
    assert config.model.rope.theta == 500000
    assert load_config(path, ["data.packing=null"]).data.packing is None
    assert load_config(path, ["attention.disable=[flash,cudnn]"]).attention.disable == ("flash", "cudnn")


def test_an_override_replaces_a_list_by_a_mapping_and_the_other_way_round(tmp_path):
    raw = put(example(tmp_path), "data.train", [{"path": "a"}, "b"])
    found = faults_of(tmp_path, raw, "data.train={path: c}", "model=[1]", "train.optimizer.lr.x=1", check_files=False)
    assert [sentence.split(";")[0] for sentence in found] == [
        "`model` must be a mapping",
        "`data.train` must be text or a list (text or a mapping), or null",
        "`train.optimizer.lr` must be a number above 0",
    ]


def test_an_override_replaces_what_the_file_says_in_another_spelling(tmp_path):
    raw = put(example(tmp_path), "max_seq_length", 64)
    del raw["data"]["sequence_length"]
    assert load_config(write(tmp_path, raw), ["data.sequence_length=32"]).data.sequence_length == 32


@pytest.mark.parametrize("text", ["train.steps", "=3", "train..steps=3", "train.steps=[1", "train.steps={a: 1, a: 2}"])
def test_a_broken_override_is_named(tmp_path, text):
    faults = faults_of(tmp_path, example(tmp_path), text)
    assert any(f'override "{text}"' in fault for fault in faults)


@pytest.mark.parametrize(("text", "value"), [("1e6", 1_000_000), ("2E3", 2000), ("1_000", 1000), ("+4e0", 4)])
def test_counts_may_be_written_with_an_exponent(tmp_path, text, value):
    config = load_config(write(tmp_path, example(tmp_path)), [f"data.packing.window_documents={text}"])
    assert config.data.packing.window_documents == value
    assert isinstance(config.data.packing.window_documents, int)


def test_small_numbers_are_numbers(tmp_path):
    """YAML 1.1 reads 2e-5 as text."""
    path = write(tmp_path, example(tmp_path))
    path.write_text(path.read_text().replace("lr: 0.001", "lr: 2e-5"))
    assert load_config(path).train.optimizer.lr == 2e-5


def test_dotted_keys_at_the_top_and_interpolation(tmp_path):
    raw = example(tmp_path)
    raw["train.seed"] = 3
    raw["data"]["seed"] = "${train.seed}"
    config = load_config(write(tmp_path, raw))
    assert config.train.seed == config.data.seed == 3


def test_dotted_and_nested_spellings_of_a_key_must_agree(tmp_path):
    raw = example(tmp_path)
    raw["train.steps"] = raw["train"]["steps"]
    raw["train.optimizer"] = {"eps": 1e-7}
    raw["data.packing.seed"] = 3
    config = load_config(write(tmp_path, raw))
    assert config.train.optimizer.eps == 1e-7 and config.train.optimizer.lr == raw["train"]["optimizer"]["lr"]
    assert config.data.packing.seed == 3
    raw["train.steps"] = 11
    raw["train.optimizer"] = {"lr": 1.0}
    raw["data.train"] = {"path": "x"}
    found = faults_of(tmp_path, raw)
    nested = raw["train"]["steps"]
    assert f"`train.steps` stands twice, nested as {nested} and dotted as 11. Keep one of the two." in found
    assert any("`train.optimizer.lr` stands twice" in sentence for sentence in found)
    assert any("`data.train` stands twice" in sentence for sentence in found)


def test_arguments_of_wandb_are_checked_without_it(tmp_path):
    raw = put(example(tmp_path), "log.wandb", {"project": "a", "tags": ["b"], "id": "c"})
    assert load_config(write(tmp_path, raw)).log.wandb == {"project": "a", "tags": ["b"], "id": "c"}
    wrong, ours = faults_of(tmp_path, put(raw, "log.wandb", {"projcet": "a", "dir": "b"}))
    assert "`log.wandb.projcet` is no argument of wandb.init" in wrong and "Did you mean `project`?" in wrong
    assert ours == '`log.wandb.dir` is set by Freight itself; got "b". Remove it.'


def test_the_environment_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FREIGHT_SECRET", "7")
    faults = faults_of(tmp_path, put(example(tmp_path), "train.seed", "${oc.env:FREIGHT_SECRET}"))
    assert any("does not read the environment" in fault for fault in faults)


def test_what_is_written_back_loads_equal_and_shows_every_default(tmp_path):
    raw = example(tmp_path)
    raw["checkpoint"] = {"async": False}
    raw["log"] = {}
    config = load_config(write(tmp_path, raw))
    text = to_yaml(config)
    again = load_config(write(tmp_path, text))
    assert again == config
    assert again.model_fields_set == config.model_fields_set
    assert again.train.model_fields_set == config.train.model_fields_set
    assert "# grad_clip: 1.0" in text
    assert "async: false" in text
    assert "# num_layers" not in text, "an architecture's defaults come from the preset, not from the schema"
