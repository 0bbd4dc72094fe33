"""The streamed norm and loss equal the plain ones, whatever the pieces; nothing of full length is saved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from freight.memory.stores import DeviceStore
from freight.nn.norm import RMSNorm
from freight.ops.cross_entropy import Recipe, linear_cross_entropy
from freight.ops.streamed_cross_entropy import RowStream, streamed_cross_entropy

Case = tuple[Tensor, nn.Module, Tensor]


def case(tokens: int, scale: float = 1.0, vocab: int = 11) -> Case:
    generator = torch.Generator().manual_seed(tokens)
    norm = RMSNorm(4, 1e-5, offset=False).double()
    with torch.no_grad():
        norm.weight.copy_(1 + torch.randn(4, generator=generator))
    hidden = torch.randn(tokens, 4, dtype=torch.float64, generator=generator).requires_grad_()
    weight = (scale * torch.randn(vocab, 4, dtype=torch.float64, generator=generator)).requires_grad_()
    return hidden, norm, weight


def plain(hidden: Tensor, norm: nn.Module, weight: Tensor, labels: Tensor, recipe: Recipe) -> list[Tensor]:
    sums = linear_cross_entropy(
        norm(hidden),
        weight,
        labels,
        chunk_tokens=recipe.chunk_tokens,
        softcap=recipe.softcap,
        label_smoothing=recipe.label_smoothing,
        z_loss_coeff=recipe.z_loss_coeff,
    )
    return [*sums, *torch.autograd.grad(sums.objective / 7, (hidden, weight, *norm.parameters()))]


def streamed(
    hidden: Tensor, norm: nn.Module, weight: Tensor, labels: Tensor, recipe: Recipe, tokens: int
) -> list[Tensor]:
    sums = streamed_cross_entropy(hidden, norm, weight, labels, recipe, RowStream(DeviceStore(), tokens))
    return [*sums, *torch.autograd.grad(sums.objective / 7, (hidden, weight, *norm.parameters()))]


@settings(max_examples=60)
@given(
    labels=st.lists(st.sampled_from([-100, -100, 0, 1, 5, 10]), min_size=1, max_size=13),
    tokens=st.integers(1, 14),
    chunk_tokens=st.integers(1, 5),
    softcap=st.sampled_from([None, 0.7, 5.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    z=st.sampled_from([None, 1e-2]),
    scale=st.sampled_from([1.0, 1e4]),
)
def test_sums_and_gradients(
    labels: list[int],
    tokens: int,
    chunk_tokens: int,
    softcap: float | None,
    smoothing: float,
    z: float | None,
    scale: float,
) -> None:
    inputs, targets = case(len(labels), scale), torch.tensor(labels)
    recipe = Recipe(chunk_tokens, softcap, smoothing, z)
    found, expected = streamed(*inputs, targets, recipe, tokens), plain(*inputs, targets, recipe)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * scale)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "norm", "hidden norm", "weight norm"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    hidden, norm, weight = case(6)
    labels = torch.tensor([1, 2, -100, 3, 4, 5])
    of = {"hidden": hidden, "weight": weight, "norm": next(norm.parameters())}
    for name in frozen.split():
        of[name].requires_grad_(False)
    trained = [tensor for tensor in of.values() if tensor.requires_grad]
    recipe = Recipe(2, None, 0.0, None)
    sums = streamed_cross_entropy(hidden, norm, weight, labels, recipe, RowStream(DeviceStore(), 4))
    expected = linear_cross_entropy(norm(hidden), weight, labels, chunk_tokens=2).objective
    for a, b in zip(torch.autograd.grad(sums.objective, trained), torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_nothing_is_lent_without_gradients() -> None:
    class Refusing(DeviceStore):
        def lend(self, name: str, like: Tensor, rows: int) -> Tensor:
            raise AssertionError

    hidden, norm, weight = case(6)
    labels = torch.tensor([1, 2, -100, 3, 4, 5])
    with torch.no_grad():
        sums = streamed_cross_entropy(hidden, norm, weight, labels, Recipe(2, None, 0, None), RowStream(Refusing(), 4))
    assert not sums.objective.requires_grad and sums.nll > 0


def test_no_labels_give_zero_with_a_graph() -> None:
    hidden, norm, weight = case(5)
    found = streamed(hidden, norm, weight, torch.full((5,), -100), Recipe(2, None, 0.1, 0.1), 2)
    assert all(not value.any() for value in found)


def test_a_second_backward_is_refused() -> None:
    hidden, norm, weight = case(5)
    recipe, stream = Recipe(2, None, 0.0, None), RowStream(DeviceStore(), 2)
    loss = streamed_cross_entropy(hidden, norm, weight, torch.arange(5), recipe, stream).objective
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_logits_and_normed_states_of_a_piece_are_all_there_is() -> None:
    tokens, vocab = 64, 40
    hidden, norm, weight = case(tokens, vocab=vocab)
    seen: list[int] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape[0])
            return norm(x)

        def parameters(self, recurse: bool = True):  # type: ignore[no-untyped-def]
            return norm.parameters()

    labels = torch.arange(tokens) % vocab
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
        sums = streamed_cross_entropy(
            hidden, Watch(), weight, labels, Recipe(4, None, 0, None), RowStream(DeviceStore(), 8)
        )
    sums.objective.backward()
    assert max(seen) <= 8 * 4
