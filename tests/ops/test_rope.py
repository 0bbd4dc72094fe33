"""Rotary embedding against its formulas pair by pair, and against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from freight.config.architecture import RopeConfig
from freight.ops.rope import RopeSpec, apply_rope, rotation
from tests.oracles.rope import frequencies, rotate

HEAD_DIM, LONGEST = 64, 4096
SHORT_FACTORS = tuple(1.0 + i / 40 for i in range(32))
LONG_FACTORS = tuple(2.0 + i for i in range(32))
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": dict(type="linear", factor=8.0),
    "dynamic": dict(type="dynamic", factor=2.0),
    "llama3": dict(
        type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024
    ),
    "yarn": dict(type="yarn", factor=4.0, original_max_position_embeddings=1024),
    "yarn, factor from lengths": dict(type="yarn", original_max_position_embeddings=512),
    "yarn, whole ramp": dict(type="yarn", factor=16.0, beta_fast=4.0, beta_slow=2.0, truncate=False),
    "yarn, mscale": dict(type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.8),
    "yarn, one mscale": dict(type="yarn", factor=40.0, mscale=0.707),
    "yarn, attention factor": dict(type="yarn", factor=4.0, attention_factor=1.25),
    "longrope": dict(
        type="longrope", short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS, original_max_position_embeddings=1024
    ),
    "longrope, attention factor": dict(
        type="longrope",
        short_factor=SHORT_FACTORS,
        long_factor=LONG_FACTORS,
        factor=32.0,
        attention_factor=1.1,
        original_max_position_embeddings=1024,
    ),
    "proportional": dict(type="proportional", factor=2.0),
}


def spec_of(
    scaling: dict[str, Any] | None, *, theta: float = 10000.0, head_dim: int = HEAD_DIM, **rope: Any
) -> RopeSpec:
    config = RopeConfig.model_validate(dict(theta=theta, scaling=scaling) | rope)
    return RopeSpec.from_config(config, head_dim, LONGEST)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("length", [100, 4096, 20000])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor_equal_transformers(name: str, percent: float, length: int) -> None:
    scaling = dict(SCALINGS[name])
    if percent != 1.0 and "short_factor" in scaling:
        scaling |= dict(short_factor=SHORT_FACTORS[:16], long_factor=LONG_FACTORS[:16])
    spec = spec_of(scaling, percent=percent)
    parameters = {key: list(value) if isinstance(value, tuple) else value for key, value in scaling.items()}
    kind = parameters.pop("type")
    parameters |= dict(rope_type=kind, rope_theta=10000.0, partial_rotary_factor=percent)
    if kind in ("yarn", "longrope"):
        parameters.setdefault("original_max_position_embeddings", LONGEST)
        parameters.setdefault("factor", None if "original_max_position_embeddings" in scaling else 1.0)
    config = LlamaConfig(
        hidden_size=HEAD_DIM, num_attention_heads=1, max_position_embeddings=LONGEST, rope_parameters=parameters
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    got = spec.inverse_frequencies(lengths(length))
    got = got[0] if got.ndim == 2 else got
    torch.testing.assert_close(got, expected.double(), rtol=3e-7, atol=0)
    assert spec.attention_factor == pytest.approx(factor, rel=1e-12)
    positions = torch.arange(0, 4096, 97)
    cos, sin = rotation(positions, torch.full_like(positions, length), spec, torch.float64)
    angles = positions.double()[:, None] * expected.double()
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0, atol=5e-4)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", [None, *SCALINGS])
def test_frequencies_equal_the_formulas(name: str | None) -> None:
    scaling = SCALINGS[name] if name else None
    spec = spec_of(scaling)
    for length in (1, 1024, 1025, 9000):
        got = spec.inverse_frequencies(lengths(length)).reshape(-1).tolist()
        assert got == pytest.approx(frequencies(spec.config, HEAD_DIM, LONGEST, length), rel=1e-12)


def test_llama3_scaling_has_its_effect() -> None:
    scaling = dict(SCALINGS["llama3"], original_max_position_embeddings=8192)
    ratio = spec_of(scaling, theta=5e5).inverse_frequencies(lengths(1)) / spec_of(None, theta=5e5).inverse_frequencies(
        lengths(1)
    )
    expected = [1.0] * 15 + [0.605573, 0.303743, 0.103448] + [0.03125] * 14
    assert ratio.tolist() == pytest.approx(expected, abs=1e-6)


def test_linear_scaling_has_its_effect() -> None:
    ratio = spec_of(SCALINGS["linear"]).inverse_frequencies(lengths(1)) / spec_of(None).inverse_frequencies(lengths(1))
    assert ratio.tolist() == pytest.approx([0.125] * 32, rel=1e-14)


def test_dynamic_scaling_goes_by_each_document() -> None:
    config = RopeConfig.model_validate(dict(scaling=dict(type="dynamic", factor=2.0)))
    spec = RopeSpec.from_config(config, 8, 16)
    long, short, padding, edge = spec.inverse_frequencies(lengths(32, 5, 0, 16))
    plain = [10000.0 ** (-i / 4) for i in range(4)]
    assert long.tolist() == pytest.approx([43267.487109 ** (-i / 4) for i in range(4)], rel=1e-9)
    for row in (short, padding, edge):
        assert row.tolist() == pytest.approx(plain, rel=1e-14)


def test_longrope_goes_by_each_document() -> None:
    spec = spec_of(SCALINGS["longrope"])
    rows = spec.inverse_frequencies(lengths(1024, 1025))
    expected = [long / short for short, long in zip(SHORT_FACTORS, LONG_FACTORS, strict=True)]
    assert (rows[0] / rows[1]).tolist() == pytest.approx(expected, rel=1e-12)


def test_angles_are_not_rounded() -> None:
    """float32 angles would be off by 3e-2 at a million; positions in bfloat16 would collapse 257 to 256."""
    spec = spec_of(None, head_dim=128)
    positions = torch.tensor([0, 1, 257, 4095, 15962, 1_000_000])
    for dtype in (torch.bfloat16, torch.float32):
        cos, sin = rotation(positions, positions, spec, dtype)
        assert cos.dtype == sin.dtype == torch.float32
        exact = [[math.cos(p * 10000.0 ** (-i / 64)) for i in range(64)] for p in positions.tolist()]
        torch.testing.assert_close(cos, torch.tensor(exact), rtol=0, atol=1e-6)


def test_scores_of_both_pairings() -> None:
    config = RopeConfig(theta=10000.0)
    spec = RopeSpec.from_config(config, 4, 16)
    assert spec.inverse_frequencies(lengths(4)).tolist() == pytest.approx([1, 0.01])
    q, k = torch.tensor([[[1.0, 2, 3, 4]]], dtype=torch.float64), torch.ones(1, 1, 4, dtype=torch.float64)
    cos, sin = rotation(lengths(3, 1), lengths(4, 4), spec, torch.float64)

    def score(order: list[int], interleaved: bool) -> float:
        rotated = apply_rope(q[..., order], cos[:1], sin[:1], interleaved)
        return (rotated * apply_rope(k[..., order], cos[1:], sin[1:], interleaved)).sum().item()

    assert score([0, 1, 2, 3], True) == pytest.approx(4.820863, abs=1e-6)
    assert score([0, 2, 1, 3], False) == pytest.approx(4.820863, abs=1e-6)
    assert score([0, 1, 2, 3], False) == pytest.approx(2.475621, abs=1e-6)


@settings(max_examples=40)
@given(
    half=st.integers(1, 4),
    rest=st.integers(0, 3),
    heads=st.integers(1, 3),
    interleaved=st.booleans(),
    positions=st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_rotation_of_every_token_and_its_gradient(
    half: int, rest: int, heads: int, interleaved: bool, positions: list[int], dtype: torch.dtype
) -> None:
    head_dim = 2 * half + rest
    omegas = [10000.0 ** (-i / half) for i in range(half)]
    angles = torch.tensor(positions).double()[:, None] * torch.tensor(omegas, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    x = torch.randn(len(positions), heads, head_dim, dtype=torch.float64).to(dtype).requires_grad_()
    upstream = torch.randn(x.shape, dtype=torch.float64).to(dtype)
    apply_rope(x, cos, sin, interleaved).backward(upstream)
    plain = x.detach().double().requires_grad_()
    rows = [
        [rotate(head, p, omegas, 1.0, interleaved) for head in token] for token, p in zip(plain, positions, strict=True)
    ]
    expected = torch.stack([torch.stack(row) for row in rows])
    expected.backward(upstream.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    got = apply_rope(x, cos, sin, interleaved)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    assert x.grad is not None and plain.grad is not None
    torch.testing.assert_close(x.grad.double(), plain.grad, rtol=tolerance, atol=tolerance)


def test_proportional_rotates_all_dims_some_by_nothing() -> None:
    spec = spec_of(SCALINGS["proportional"], percent=0.25)
    assert spec.rotary_dim == HEAD_DIM
    inverse = spec.inverse_frequencies(lengths(1))
    assert inverse.tolist() == pytest.approx([10000.0 ** (-i / 32) / 2 for i in range(8)] + [0.0] * 24)


def test_equal_specs_are_one_key() -> None:
    assert spec_of(SCALINGS["yarn"]) == spec_of(SCALINGS["yarn"])
    assert len({spec_of(SCALINGS["yarn"]), spec_of(SCALINGS["yarn"]), spec_of(SCALINGS["llama3"])}) == 2
