"""Training with an adapter: what moves, what does not, and that packing, ranks, chunks and resuming change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from freight.assemble.adapters import adapter_targets, targets_for
from freight.assemble.build import architecture_for, build_model, compile_blocks
from freight.checkpoint.state_metadata import StateReader
from freight.config.schema import AdapterConfig, Config
from freight.errors import CheckpointError, ConfigError
from freight.nn.decoder import Decoder
from freight.ops.batch import TokenBatch
from freight.parallel.data import whole
from freight.parallel.mesh import build_mesh
from freight.train.optimizer import optimizer_state
from freight.verify.ranks import RankPool
from tests.train.tiny_run import TinyRun, config, no_peak, same

pytestmark = pytest.mark.usefixtures("mesh")  # whatever builds a model needs a process group

DOCUMENTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


def settings(adapter: dict[str, Any], **sections: Any) -> Config:
    return config(Path("unused"), adapter={"rank": 4} | adapter, **sections)


def model_of(run: Config, mesh: DeviceMesh, seed: int | None = None) -> Decoder:
    """A model as training builds it; with a seed, B and the lengths are random as if it had been trained."""
    model = build_model(architecture_for(run), run, mesh)
    generator = torch.Generator().manual_seed(seed or 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if seed is not None and ("lora_B" in name or "magnitude" in name):
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                local = parameter.to_local()  # type: ignore[attr-defined]
                rows = noise if local.shape == noise.shape else _own_rows(parameter, noise)
                local.copy_(local * (1 + rows) if "magnitude" in name else rows)
    return model


def _own_rows(parameter: Tensor, noise: Tensor) -> Tensor:
    chunk = parameter.__create_chunk_list__()[0]  # type: ignore[attr-defined]
    start = chunk.offsets[0]
    return noise[start : start + chunk.sizes[0]]


def gradients(model: Decoder, batches: list[TokenBatch]) -> dict[str, Tensor]:
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)  # type: ignore[operator]
        model(batch).objective.backward()
    return {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [{}, {"use_dora": True, "use_rslora": True}])
def test_before_the_first_update_a_model_is_its_base(mesh: DeviceMesh, precision: str, adapter: dict[str, Any]) -> None:
    run = settings(adapter, train={"precision": precision})
    batch = TokenBatch.from_documents(DOCUMENTS)
    base = run.model_copy(update={"adapter": None})
    plain, adapted = (build_model(architecture_for(c), c, mesh)(batch).nll for c in (base, run))
    assert torch.equal(plain, adapted) or (precision == "bf16" and (plain - adapted).abs() < 1e-3 * plain)


def test_only_the_adapter_moves_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_peak(monkeypatch)
    run = TinyRun(
        config(tmp_path, adapter={"rank": 4, "layers": [1]}, train={"epochs": None, "steps": 2, "schedule": {}})
    )
    model, optimizer = run.trainable.model, run.trainable.optimizer
    before = {name: whole(parameter).clone() for name, parameter in model.named_parameters()}
    run.run()
    adapted = {name for name in before if ".lora_" in name}
    assert len(adapted) == 14 and all(name.startswith("layers.1.") for name in adapted)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), before[name]) == (name not in adapted), name
        if "lora_B" in name:
            assert not before[name].any() and whole(parameter).count_nonzero() > 0.9 * parameter.numel()
    assert optimizer_state(model, optimizer).keys() == adapted
    saved = StateReader((tmp_path / "checkpoints/latest").resolve()).tensors()
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} == adapted
    assert {name.split(".step")[0].split(".exp_avg")[0] for name in saved if name.startswith("optimizer.")} == {
        f"optimizer.{name}" for name in adapted
    }


def test_the_base_is_held_once_in_the_compute_dtype(mesh: DeviceMesh) -> None:
    run = settings({"use_dora": True, "modules_to_save": ["embed_tokens"]}, train={"precision": "bf16"})
    model = model_of(run, mesh)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "embed_tokens.weight" in trained
    gradients(model, [TokenBatch.from_documents(DOCUMENTS)])
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16), name
        assert (parameter.grad is not None) == (name in trained), name


@pytest.mark.parametrize("adapter", [{}, {"use_dora": True, "modules_to_save": ["embed_tokens", "norm"]}])
def test_packed_equals_each_document_alone(mesh: DeviceMesh, adapter: dict[str, Any]) -> None:
    run = settings(adapter)
    packed = gradients(model_of(run, mesh, 1), [TokenBatch.from_documents(DOCUMENTS, pad_to=20)])
    alone = gradients(model_of(run, mesh, 1), [TokenBatch.from_documents([document]) for document in DOCUMENTS])
    assert packed.keys() == alone.keys() and len(packed) > 0
    for name, gradient in packed.items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, alone[name], rtol=1e-4, atol=1e-5, msg=name)


def _rank_gradients(adapter: dict[str, Any], precision: str) -> dict[str, Tensor]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = model_of(settings(adapter, train={"precision": precision}), build_mesh(world), 1)
    # the dropout of a document goes by its microbatch, whatever rank computes it
    batches = [TokenBatch.from_documents([d], microbatch=i, step=3, seed=7) for i, d in enumerate(DOCUMENTS[:2])]
    return gradients(model, batches if world == 1 else [batches[rank]])


@pytest.mark.parametrize(
    ("adapter", "precision"),
    [({"dropout": 0.3, "modules_to_save": ["embed_tokens"]}, "fp32"), ({"use_dora": True, "layers": [1]}, "bf16")],
)
def test_two_ranks_give_the_gradients_of_one(ranks: RankPool, adapter: dict[str, Any], precision: str) -> None:
    seconds = 300.0  # a rank imports peft at its first call, which takes long on a busy machine
    (one,) = ranks.run(_rank_gradients, 1, adapter, precision, timeout_seconds=seconds)
    for two in ranks.run(_rank_gradients, 2, adapter, precision, timeout_seconds=seconds):
        assert two.keys() == one.keys() and len(one) > 0
        for name, gradient in two.items():
            tolerance = 1e-5 if precision == "fp32" else 2e-2
            assert (gradient - one[name]).norm() <= tolerance * one[name].norm(), name


@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_with_dropout_is_bit_equal(tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    no_peak(monkeypatch)
    adapter = {"rank": 4, "dropout": 0.5, "use_dora": True}
    straight = TinyRun(config(tmp_path / "straight", adapter=adapter))
    straight.run()
    parts = {"adapter": adapter, "checkpoint": {"every_steps": stop, "keep": 99}}
    TinyRun(config(tmp_path / "parts", **parts)).run()
    resumed = TinyRun(
        config(tmp_path / "again", adapter=adapter), checkpoint=tmp_path / f"parts/checkpoints/step-{stop:06d}"
    )
    torch.rand(3)  # the global generator is nobody's source
    resumed.run()
    assert same(straight.tensors(), resumed.tensors())
    undropped = TinyRun(config(tmp_path / "undropped", adapter=adapter | {"dropout": 0.0}))
    undropped.run()
    assert not same(straight.tensors(), undropped.tensors())


def test_dropout_goes_by_token_and_module_and_is_off_in_evaluation(mesh: DeviceMesh) -> None:
    model = model_of(settings({"dropout": 0.5}), mesh, 1)
    batch = TokenBatch.from_documents(DOCUMENTS, seed=1, step=2)
    hidden = torch.randn(batch.tokens, 32, generator=torch.Generator().manual_seed(0))
    q, up = model.blocks[0].attention.q_proj, model.blocks[0].mlp.up_proj
    model(batch)  # gathers the parameters
    whole_range = q(hidden, batch.range())
    assert torch.equal(whole_range, q(hidden, batch.range()))
    chunks = [q(hidden[a:b], batch.range(a, b)) for a, b in ((0, 4), (4, 15))]
    torch.testing.assert_close(torch.cat(chunks), whole_range)
    other = TokenBatch.from_documents(DOCUMENTS, seed=1, step=3)
    assert not torch.allclose(whole_range, q(hidden, other.range()))
    sites = {m.dropout.site for m in (q, up, model.blocks[1].attention.q_proj)}  # type: ignore[union-attr]
    assert len(sites) == 3
    model.eval()
    assert torch.equal(q(hidden, batch.range()), q(hidden, other.range()))


def test_a_changed_adapter_or_base_is_refused_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_peak(monkeypatch)
    TinyRun(config(tmp_path / "a", adapter={"rank": 4}, train={"epochs": None, "steps": 1, "schedule": {}})).run()
    checkpoint = tmp_path / "a/checkpoints/step-000001"
    for changes, message in (
        ({"adapter": {"rank": 4, "alpha": 16}}, r"`adapter\.alpha` was 32.*is 16"),
        ({"adapter": {"rank": 4}, "train": {"seed": 1}}, r"weights of `train\.seed` are not those"),
        ({}, "was trained with `adapter`"),
    ):
        with pytest.raises(CheckpointError, match=message):
            TinyRun(config(tmp_path / "b", **changes), checkpoint=checkpoint)


def test_names_of_the_family_and_ours_mean_the_same() -> None:
    arch = architecture_for(settings({}))

    def chosen(**keys: Any) -> tuple[str, ...]:
        return adapter_targets(AdapterConfig(**keys), arch).lora

    assert chosen(target_modules=("model.layers.1.self_attn.q_proj",)) == ("layers.1.attention.q_proj",)
    assert chosen(target_modules=("attention.q_proj",), layers=(1,)) == ("layers.1.attention.q_proj",)
    assert len(chosen()) == 14 and not any("head" in name for name in chosen())
    tied = adapter_targets(AdapterConfig(modules_to_save=("lm_head",)), arch)
    assert tied.full == ("embed_tokens",)


def test_a_part_of_a_fused_module_is_not_saved_alone() -> None:
    gpt2 = {"family": "gpt2", "norm": "layernorm", "position_embedding": "learned", "activation": "gelu_tanh"}
    arch = architecture_for(
        settings({}, model={**gpt2, "num_query_groups": 4, "attention_bias": True, "mlp_bias": True})
    )
    assert adapter_targets(AdapterConfig(target_modules=("c_attn",), layers=(0,)), arch).lora == tuple(
        f"layers.0.attention.{x}_proj" for x in "qkv"
    )
    with pytest.raises(ConfigError, match=r"without layers\.0\.attention\.k_proj; they are saved as one. Use c_attn"):
        adapter_targets(AdapterConfig(target_modules=("c_fc",), modules_to_save=("q_proj",)), arch)
    with pytest.raises(ConfigError, match="Name it in one of them"):
        adapter_targets(AdapterConfig(modules_to_save=("c_fc",)), arch)


def test_without_adapter_there_are_no_targets() -> None:
    run = settings({}).model_copy(update={"adapter": None})
    assert targets_for(run, architecture_for(run)) is None


@pytest.mark.slow
def test_compiled_equals_eager(mesh: DeviceMesh) -> None:
    run = settings({"dropout": 0.3, "use_dora": True})
    batches = [TokenBatch.from_documents(DOCUMENTS, step=step) for step in (1, 2)]
    eager = gradients(model_of(run, mesh, 1), batches)
    model = model_of(run, mesh, 1)
    compile_blocks(model, backend="aot_eager")
    compiled = gradients(model, batches)
    assert compiled.keys() == eager.keys()
    for name, gradient in compiled.items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-4, atol=1e-6, msg=name)
