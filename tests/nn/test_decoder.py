"""The decoder against a slow float64 reference: loss and every gradient, for every architectural switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freight.config.architecture import Architecture
from freight.nn.block import PlainRunner
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights
from freight.nn.loss_head import LogitsHead
from freight.ops.batch import TokenBatch
from tests.nn.small_decoders import SMALL, VARIANTS, build
from tests.oracles.decoder import naive_core, reference_logits, reference_loss

DOCUMENTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]


def gradients(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_packed_loss_and_every_gradient_equal_the_reference_on_single_documents(changes: dict[str, Any]) -> None:
    model, arch = build(**changes)
    batch = TokenBatch.from_documents(DOCUMENTS, pad_to=12)
    sums = model(batch)
    sums.objective.backward()
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    expected = reference_loss(arch, weights, DOCUMENTS)
    expected.backward()
    assert sums.objective.item() == pytest.approx(expected.item(), rel=1e-12)
    assert sums.nll.item() == pytest.approx(expected.item(), rel=1e-12)
    got = gradients(model)
    for name, weight in weights.items():
        torch.testing.assert_close(
            got[name], weight.grad, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert got[name].abs().max() > 0 or "k_proj.bias" in name


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "dynamic rope", "gpt2"])
def test_documents_see_nothing_of_each_other_bit_for_bit(name: str) -> None:
    model, _ = build(**VARIANTS[name])

    def run(first: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of the second document, and every gradient of its loss alone."""
        documents = [first, [4, 5, 6, 7, 8]]
        labels = [[-100] * len(first), [5, 6, 7, 8, -100]]
        batch = TokenBatch.from_documents(documents, labels, pad_to=10)
        model.zero_grad()
        model(batch).objective.backward()
        return model(batch, LogitsHead())[len(first) : len(first) + 5], gradients(model)

    logits, grads = run([1, 2, 3])
    other_logits, other_grads = run([9, 9, 9])
    assert torch.equal(logits, other_logits)
    for parameter, grad in grads.items():
        assert torch.equal(grad, other_grads[parameter]), parameter


def test_a_document_loss_leaves_no_gradient_at_tokens_of_another() -> None:
    model, _ = build(tie_embeddings=False)
    batch = TokenBatch.from_documents([[1, 2, 3], [4, 5, 6]], [[-100] * 3, [5, 6, -100]], pad_to=8, pad_id=30)
    model(batch).objective.backward()
    grad = model.embed_tokens.weight.grad
    assert grad is not None
    assert grad[[1, 2, 3, 30]].abs().max() == 0
    assert grad[[4, 5]].abs().amin(dim=1).min() > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_head_gives_the_rows_asked_for(name: str) -> None:
    model, arch = build(**VARIANTS[name])
    weights = dict(model.named_parameters())
    expected = torch.cat([reference_logits(arch, weights, torch.tensor(d)) for d in DOCUMENTS[:2]])
    batch = TokenBatch.from_documents(DOCUMENTS[:2])
    rows = torch.tensor([7, 0, 3])
    torch.testing.assert_close(
        model(batch, LogitsHead(rows, arch.final_softcap)), expected[rows], rtol=1e-9, atol=1e-12
    )


def test_running_mean_attention_stays_within_documents() -> None:
    """With q = k = 0 and v = token id, context is a running mean: exact numbers show who saw whom."""
    arch = Architecture.model_validate(SMALL | dict(num_layers=1, hidden_size=4, num_attention_heads=1))
    model = Decoder(arch, core=naive_core).double()
    init_weights(model, 0)
    block = model.blocks[0]
    with torch.no_grad():
        block.attention.q_proj.weight.zero_()
        block.attention.k_proj.weight.zero_()
    ids = [[1, 2, 3], [4, 5, 6, 7, 8]]
    batch = TokenBatch.from_documents(ids, pad_to=10)
    q, k, _ = block.pre(model.embed(batch), batch.range())
    values = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 0, 0], dtype=torch.float64)[:, None, None].expand(10, 1, 4)
    context = block.core(q, k, values, batch)[:, 0, 0]
    torch.testing.assert_close(context, torch.tensor([1, 1.5, 2, 4, 4.5, 5, 5.5, 6, 0, 0], dtype=torch.float64))


def test_shapes_when_head_dim_is_not_hidden_over_heads() -> None:
    model, arch = build(hidden_size=12, num_attention_heads=2, num_query_groups=1, head_dim=8)
    attention = model.blocks[0].attention
    shapes = [tuple(getattr(attention, f"{p}_proj").weight.shape) for p in "qkvo"]
    assert shapes == [(16, 12), (8, 12), (8, 12), (12, 16)]
    assert attention.spec.scale == pytest.approx(0.353553, abs=1e-6)
    assert attention.rope is not None and attention.rope.rotary_dim == 8
    assert Architecture.model_validate(SMALL | dict(hidden_size=12, num_attention_heads=2)).dims_per_head == 6
    assert arch.dims_per_head == 8


def test_query_scale_comes_from_the_configuration() -> None:
    model, _ = build(attention_scale=224**-0.5, head_dim=256)
    assert model.blocks[0].attention.spec.scale == pytest.approx(0.066815, abs=1e-6)


def test_parameter_names_are_those_of_saved_state() -> None:
    model, _ = build(
        num_layers=1, norm="layernorm", qk_norm="head", norm_placement="sandwich", attention_bias="qkv", mlp_bias=True,
        position_embedding="learned", tie_embeddings=False,
    )  # fmt: skip
    norms = ["attention_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm"]
    linears = [
        "attention.q_proj",
        "attention.k_proj",
        "attention.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    parts = [f"layers.0.{name}.{kind}" for name in norms + linears for kind in ("weight", "bias")]
    parts += [f"layers.0.attention.{name}.weight" for name in ("o_proj", "q_norm", "k_norm")]
    rest = ["embed_tokens.weight", "embed_positions.weight", "norm.weight", "norm.bias", "head.weight"]
    assert sorted(dict(model.named_parameters())) == sorted(parts + rest)
    tied, _ = build(activation="gelu")
    names = dict(tied.named_parameters())
    assert "head.weight" not in names and not any("gate_proj" in name for name in names)


def test_dropout_is_asked_for_in_training_only() -> None:
    rates: list[float] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, spec: Any) -> Tensor:
        rates.append(spec.dropout)
        return naive_core(q, k, v, batch, spec)

    arch = Architecture.model_validate(SMALL | dict(attention_dropout=0.25))
    model = Decoder(arch, core=recording)
    init_weights(model, 0)
    batch = TokenBatch.from_documents(DOCUMENTS)
    model.train()(batch)
    model.eval()(batch)
    assert rates == [0.25, 0.25, 0.0, 0.0]


class CountingRunner(PlainRunner):
    def __init__(self) -> None:
        self.parts: list[str] = []

    def run_part(self, name: str, function: Any, *inputs: Any) -> Any:
        self.parts.append(name)
        return super().run_part(name, function, *inputs)


def test_runner_sees_every_named_part() -> None:
    model, _ = build(num_layers=1)
    runner = CountingRunner()
    model.use_runner(runner)
    model(TokenBatch.from_documents(DOCUMENTS))
    assert runner.parts == ["embed", "norm", "qkv", "core", "norm", "mlp", "activation"]


def test_pre_and_post_work_on_any_range_of_tokens() -> None:
    model, _ = build(num_query_groups=2)
    block, batch = model.blocks[0], TokenBatch.from_documents(DOCUMENTS, pad_to=12)
    hidden = model.embed(batch)
    whole = block.pre(hidden, batch.range())
    pieces = [block.pre(hidden[a:b], batch.range(a, b)) for a, b in [(0, 5), (5, 6), (6, 12)]]
    context = block.core(*whole, batch)
    for part, expected in zip(zip(*pieces, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(part), expected, rtol=1e-12, atol=1e-13)
    posted = torch.cat([block.post(hidden[a:b], context[a:b], batch.range(a, b)) for a, b in [(0, 7), (7, 12)]])
    torch.testing.assert_close(posted, block.post(hidden, context, batch.range()), rtol=1e-12, atol=1e-13)


def test_layers_that_rotate_alike_share_one_rotation() -> None:
    batch = TokenBatch.from_documents(DOCUMENTS)
    build(num_layers=2)[0](batch)
    assert sum("rotation" in str(key) for key in batch._cache) == 1
    batch = TokenBatch.from_documents(DOCUMENTS)
    build(**VARIANTS["two ropes"])[0](batch)
    assert sum("rotation" in str(key) for key in batch._cache) == 2


def test_bfloat16_decoder_keeps_its_dtype_and_is_near_float64() -> None:
    model, _ = build(**VARIANTS["gemma2"])
    batch = TokenBatch.from_documents(DOCUMENTS)
    exact = model(batch).nll.item()
    sums = model.to(torch.bfloat16)(TokenBatch.from_documents(DOCUMENTS))
    sums.objective.backward()
    assert sums.nll.dtype == torch.float32
    assert sums.nll.item() == pytest.approx(exact, rel=0.03)
    assert all(grad.dtype == torch.bfloat16 and grad.isfinite().all() for grad in gradients(model).values())
