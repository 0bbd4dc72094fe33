"""Every attention kernel, what it can do, and which one is chosen.

The choice is a pure function of values, so that what an H100 would run is tested on a laptop. Kernels agree to
rounding; the choice changes cost only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from freight.errors import ConfigError
from freight.ops import attention_cuda, attention_kernels
from freight.ops.attention_kernels import BlockCall, Grads
from freight.ops.attention_mask import MaskKind
from freight.ops.linear import fast_bf16

HALF = (torch.bfloat16, torch.float16)
SQUARE_KINDS = frozenset({MaskKind.FULL, MaskKind.CAUSAL})
ALL_KINDS = frozenset(MaskKind)
VARLEN_KINDS = SQUARE_KINDS | {MaskKind.WINDOW, MaskKind.DOCUMENTS}

# Up to this many tokens the CPU's native 16-bit backward loses to explicit gradients in float32.
SHORT_TOKENS = 128


@dataclass(frozen=True)
class Backend:
    """One kernel and its declared capabilities.

    Args:
        name: As `attention.backend` spells it.
        devices: Device types it runs on.
        dtypes: Input dtypes.
        kinds: Mask kinds it takes as they are; the plan breaks others into these.
        forward: Kernel in the common form.
        backward: Kernel in the common form.
        min_capability: Smallest CUDA capability, 80 for sm80.
        max_head_dim: Largest head_dim; None = any.
        max_head_dim_hopper: The same from sm90 on.
        softcap: Whether it caps scores.
        dropout: Whether it drops by position.
        deterministic: Whether its backward gives the same bits each time.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    kinds: frozenset[MaskKind]
    forward: Callable[[Tensor, Tensor, Tensor, BlockCall], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, BlockCall], Grads]
    min_capability: int = 0
    max_head_dim: int | None = None
    max_head_dim_hopper: int | None = None
    softcap: bool = False
    dropout: bool = False
    deterministic: bool = True

    @property
    def varlen(self) -> bool:
        """Whether documents of any lengths go in one call."""
        return MaskKind.DOCUMENTS in self.kinds and MaskKind.ANTICAUSAL not in self.kinds

    @property
    def window(self) -> bool:
        """Whether a sliding window needs no decomposition."""
        return MaskKind.WINDOW in self.kinds


class Hardware(NamedTuple):
    """What matters of a device: `cpu` or `cuda`, CUDA capability (90 for sm90), and whether bf16 arithmetic is fast."""

    device: str
    capability: int = 0
    fast_bf16: bool = True


class Request(NamedTuple):
    """What a block asks of a kernel."""

    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_query_groups: int
    tokens_q: int
    tokens_k: int
    kind: MaskKind
    equal_lengths: bool = True
    softcap: float | None = None
    dropout: float = 0.0
    deterministic: bool = False


class Choice(NamedTuple):
    """The kernel of each direction; they may differ, since `lse` means the same everywhere."""

    forward: Backend
    backward: Backend


_kernels, _cuda = attention_kernels, attention_cuda
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            name="math",
            devices=("cpu", "cuda"),
            dtypes=(torch.float64, torch.float32, *HALF),
            kinds=ALL_KINDS,
            forward=_kernels.math_forward,
            backward=_kernels.math_backward,
            softcap=True,
            dropout=True,
        ),
        Backend(
            name="cpu_flash",
            devices=("cpu",),
            dtypes=(torch.float64, torch.float32, *HALF),
            kinds=SQUARE_KINDS,
            forward=_kernels.cpu_flash_forward,
            backward=_kernels.cpu_flash_backward,
        ),
        Backend(
            name="flash",
            devices=("cuda",),
            dtypes=HALF,
            kinds=VARLEN_KINDS,
            forward=_cuda.flash_forward,
            backward=_cuda.flash_backward,
            min_capability=80,
            max_head_dim=256,
            deterministic=False,
        ),
        Backend(
            name="flash_attn",
            devices=("cuda",),
            dtypes=HALF,
            kinds=VARLEN_KINDS,
            forward=_cuda.flash_attn_forward,
            backward=_cuda.flash_attn_backward,
            min_capability=80,
            max_head_dim=256,
            softcap=True,
        ),
        Backend(
            name="cudnn",
            devices=("cuda",),
            dtypes=HALF,
            kinds=SQUARE_KINDS,
            forward=_cuda.cudnn_forward,
            backward=_cuda.cudnn_backward,
            min_capability=80,
            max_head_dim=128,
            max_head_dim_hopper=256,
            deterministic=False,
        ),
        Backend(
            name="efficient",
            devices=("cuda",),
            dtypes=(torch.float32, *HALF),
            kinds=SQUARE_KINDS,
            forward=_cuda.efficient_forward,
            backward=_cuda.efficient_backward,
            min_capability=50,
            deterministic=False,
        ),
    )
}


def hardware_of(device: torch.device) -> Hardware:
    """What `choose_backend` needs to know of a device."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return Hardware("cuda", 10 * major + minor)
    return Hardware("cpu", fast_bf16=fast_bf16(device))


@cache
def missing_backends() -> frozenset[str]:
    """Backends whose package is not installed."""
    return frozenset() if importlib.util.find_spec("flash_attn") else frozenset({"flash_attn"})


def refusal(backend: Backend, hardware: Hardware, request: Request) -> str | None:
    """What keeps a backend from a request, as `cannot ...; it ...`; None if nothing does."""
    if hardware.device not in backend.devices:
        return f"cannot run on {hardware.device}; it needs {' or '.join(backend.devices)}"
    where = "cpu" if hardware.device == "cpu" else f"cuda sm{hardware.capability}"
    if hardware.device == "cuda" and hardware.capability < backend.min_capability:
        return f"cannot run on {where}; it needs sm{backend.min_capability} or newer"
    if request.dtype not in backend.dtypes:
        known = ", ".join(_dtype_name(dtype) for dtype in backend.dtypes)
        return f"cannot run {_dtype_name(request.dtype)} on {where}; it takes {known}"
    limit = backend.max_head_dim
    if hardware.capability >= 90 and backend.max_head_dim_hopper is not None:
        limit = backend.max_head_dim_hopper
    if limit is not None and request.head_dim > limit:
        return (
            f"cannot run head_dim {request.head_dim} in {_dtype_name(request.dtype)} on {where}; it takes up to {limit}"
        )
    if request.softcap is not None and not backend.softcap:
        return f"cannot run `model.attention_softcap` {request.softcap:g}; it has no softcap"
    if request.dropout and not backend.dropout:
        return f"cannot run `model.attention_dropout` {request.dropout:g}; only math drops by position"
    if request.deterministic and not backend.deterministic:
        return "cannot run with `attention.deterministic`; its backward is not deterministic"
    return None


def choose_backend(
    hardware: Hardware, request: Request, *, backend: str = "auto", disabled: Collection[str] = ()
) -> Choice:
    """The kernel of each direction for one kind of block.

    Args:
        hardware: Where it runs.
        request: What is asked.
        backend: A name to insist on, or `auto`.
        disabled: Names that are not to be used, missing packages among them.

    Raises:
        ConfigError: The named backend cannot do it, or no backend is left.
    """
    if backend != "auto":
        named = BACKENDS[backend]
        if reason := refusal(named, hardware, request):
            raise ConfigError(f"`attention.backend: {backend}` {reason}. Use `auto` or `math`.")
        if backend in disabled:
            raise ConfigError(
                f"`attention.backend: {backend}` is in `attention.disable` or not installed. Use `auto` or allow it."
            )
        return Choice(named, named)
    forward = _first(_order(hardware, request, backward=False), hardware, request, disabled)
    backward = _first(_order(hardware, request, backward=True), hardware, request, disabled)
    return Choice(forward, backward)


def _first(names: tuple[str, ...], hardware: Hardware, request: Request, disabled: Collection[str]) -> Backend:
    """The first capable backend that is not disabled."""
    for name in names:
        if name not in disabled and refusal(BACKENDS[name], hardware, request) is None:
            return BACKENDS[name]
    raise ConfigError(
        f"every backend able to run head_dim {request.head_dim} in {_dtype_name(request.dtype)} on {hardware.device} "
        f"is in `attention.disable`; it holds {', '.join(sorted(disabled))}. Remove `math` from it."
    )


def _order(hardware: Hardware, request: Request, *, backward: bool) -> tuple[str, ...]:
    """Backends by preference; what cannot run is passed over later."""
    if hardware.device == "cpu":
        short = max(request.tokens_q, request.tokens_k) <= SHORT_TOKENS
        native = request.dtype == torch.bfloat16 and hardware.fast_bf16
        return ("math", "cpu_flash") if backward and short and native else ("cpu_flash", "math")
    if request.dtype not in HALF:
        return ("efficient", "math")
    if hardware.capability < 80:
        return ("efficient", "math")
    if hardware.capability < 90:
        order = ("flash_attn", "flash", "cudnn", "efficient", "math")
    else:
        order = ("cudnn", "flash_attn", "flash", "efficient", "math")
    ragged = request.kind == MaskKind.DOCUMENTS and not request.equal_lengths
    if ragged or request.kind == MaskKind.WINDOW:
        return tuple(name for name in order if name != "cudnn")
    return order


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
