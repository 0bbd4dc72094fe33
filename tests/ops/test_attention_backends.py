"""Which kernel is chosen, for machines that are not here."""

from __future__ import annotations

import pytest
import torch

from freight.errors import ConfigError
from freight.ops.attention_backends import BACKENDS, Hardware, Request, choose_backend, hardware_of, missing_backends
from freight.ops.attention_mask import MaskKind

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
NO_PACKAGE = frozenset({"flash_attn"})
SLOW_CPU, FAST_CPU = Hardware("cpu", fast_bf16=False), Hardware("cpu", fast_bf16=True)


def request(
    dtype: torch.dtype = BF16, head_dim: int = 128, tokens: int = 2048, kind: str = "causal", **more
) -> Request:
    return Request(dtype, head_dim, 8, 8, tokens, tokens, MaskKind(kind), **more)


def sm(capability: int) -> Hardware:
    return Hardware("cuda", capability)


@pytest.mark.parametrize(
    ("hardware", "asked", "forward", "backward"),
    [
        (sm(75), request(), "efficient", "efficient"),
        (sm(80), request(), "flash", "flash"),
        (sm(89), request(), "flash", "flash"),
        (sm(90), request(), "cudnn", "cudnn"),
        (sm(100), request(), "cudnn", "cudnn"),
        (sm(90), request(head_dim=256), "cudnn", "cudnn"),
        (sm(80), request(head_dim=320), "efficient", "efficient"),
        (sm(90), request(kind="documents", equal_lengths=False), "flash", "flash"),
        (sm(90), request(kind="documents"), "cudnn", "cudnn"),
        (sm(90), request(kind="window"), "flash", "flash"),
        (sm(90), request(F32), "efficient", "efficient"),
        (sm(90), request(F64), "math", "math"),
        (sm(90), request(softcap=50.0), "math", "math"),
        (sm(90), request(dropout=0.1), "math", "math"),
        (sm(80), request(deterministic=True), "math", "math"),
        (SLOW_CPU, request(), "cpu_flash", "cpu_flash"),
        (SLOW_CPU, request(tokens=64), "cpu_flash", "cpu_flash"),
        (FAST_CPU, request(tokens=64), "cpu_flash", "math"),
        (FAST_CPU, request(tokens=128), "cpu_flash", "math"),
        (FAST_CPU, request(tokens=129), "cpu_flash", "cpu_flash"),
        (FAST_CPU, request(F32, tokens=64), "cpu_flash", "cpu_flash"),
        (FAST_CPU, request(F64), "cpu_flash", "cpu_flash"),
        (FAST_CPU, request(softcap=1.0), "math", "math"),
        (FAST_CPU, request(dropout=0.1), "math", "math"),
    ],
)
def test_choice(hardware: Hardware, asked: Request, forward: str, backward: str) -> None:
    choice = choose_backend(hardware, asked, disabled=NO_PACKAGE)
    assert (choice.forward.name, choice.backward.name) == (forward, backward)


def test_the_package_is_used_where_it_is_installed() -> None:
    assert choose_backend(sm(80), request()).forward.name == "flash_attn"
    assert choose_backend(sm(90), request()).forward.name == "cudnn"
    assert choose_backend(sm(90), request(kind="window")).forward.name == "flash_attn"
    assert choose_backend(sm(90), request(softcap=50.0)).forward.name == "flash_attn"
    assert choose_backend(sm(90), request(deterministic=True)).forward.name == "flash_attn"
    assert missing_backends() <= {"flash_attn"}


def test_disabled_backends_are_passed_over() -> None:
    disabled = NO_PACKAGE | {"cudnn"}
    assert choose_backend(sm(90), request(), disabled=disabled).forward.name == "flash"
    assert choose_backend(SLOW_CPU, request(), disabled={"cpu_flash"}).backward.name == "math"


def test_none_left() -> None:
    with pytest.raises(ConfigError, match=r"every backend able to run head_dim 128 in bfloat16 on cpu .*disable"):
        choose_backend(SLOW_CPU, request(), disabled={"cpu_flash", "math"})


@pytest.mark.parametrize(
    ("name", "hardware", "asked", "message"),
    [
        (
            "cudnn",
            sm(90),
            request(head_dim=320),
            "cannot run head_dim 320 in bfloat16 on cuda sm90; it takes up to 256. Use",
        ),
        ("cudnn", sm(80), request(head_dim=256), "it takes up to 128"),
        ("flash", SLOW_CPU, request(), "cannot run on cpu; it needs cuda"),
        ("flash", sm(75), request(), "cannot run on cuda sm75; it needs sm80"),
        ("flash", sm(90), request(F32), "cannot run float32 on cuda sm90; it takes bfloat16, float16"),
        ("cpu_flash", SLOW_CPU, request(softcap=30.0), "`model.attention_softcap` 30; it has no softcap"),
        ("cpu_flash", SLOW_CPU, request(dropout=0.1), "`model.attention_dropout` 0.1; only math"),
        ("flash", sm(90), request(deterministic=True), "`attention.deterministic`"),
    ],
)
def test_a_named_backend_that_cannot(name: str, hardware: Hardware, asked: Request, message: str) -> None:
    with pytest.raises(ConfigError, match=f"`attention.backend: {name}`") as error:
        choose_backend(hardware, asked, backend=name)
    assert message in str(error.value)


def test_a_named_backend_that_is_disabled() -> None:
    with pytest.raises(ConfigError, match="disable"):
        choose_backend(SLOW_CPU, request(), backend="math", disabled={"math"})


def test_a_named_backend_runs_both_ways() -> None:
    choice = choose_backend(FAST_CPU, request(tokens=8), backend="cpu_flash")
    assert choice == (BACKENDS["cpu_flash"], BACKENDS["cpu_flash"])


def test_this_machine() -> None:
    assert hardware_of(torch.device("cpu")).device == "cpu"
