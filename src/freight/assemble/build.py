"""From an architecture to a model that runs: build on the meta device, wrap, allocate, fill. In that order.

Nothing is allocated before it is sharded, and weights are read tensor by tensor, so a rank never holds more than its
shards and one whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from freight.assemble.adapters import adapter_targets, add_adapter, base_name, init_adapter
from freight.assemble.execution import Execution, local_attention
from freight.checkpoint.hf_import import open_weights, read_architecture
from freight.config.architecture import Architecture
from freight.config.model import architecture_of
from freight.config.schema import AttentionConfig, Config
from freight.nn.block import Block
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights
from freight.nn.loss_head import ChunkedLossHead
from freight.ops.protocols import AttentionCore
from freight.parallel.data import COMPUTE_DTYPES, Precision, fill, shard, whole
from freight.parallel.mesh import DeviceMesh


class Weights(Protocol):
    """Whole tensors by canonical name, read when asked for."""

    def load(self, name: str) -> Tensor:
        """One tensor, in its stored dtype."""
        ...


def architecture_for(config: Config) -> Architecture:
    """What `config.model` means: the folder or preset it names, under the keys written beside it.

    Raises:
        CheckpointError: `model.hf` cannot be read.
        ConfigError: A key is missing or impossible.
    """
    base = read_architecture(config.model.hf) if config.model.hf is not None else None
    return architecture_of(config.model, base)


def weights_for(config: Config, arch: Architecture) -> Weights | None:
    """The weights that `config.model` names, checked and not yet read; None = random.

    Raises:
        CheckpointError: Weights are missing, damaged or of another shape.
    """
    return open_weights(config.model.hf, arch) if config.model.hf is not None else None


def build_model(
    arch: Architecture,
    config: Config,
    mesh: DeviceMesh,
    *,
    execution: Execution | None = None,
    weights: Weights | None = None,
    precision: Precision | None = None,
) -> Decoder:
    """A decoder ready to train: float32 master shards, gathered in `train.precision`; with `adapter`, a frozen base.

    Args:
        arch: The model.
        config: `attention` and `train` decide kernels, loss and precision.
        mesh: Of `build_mesh`; parameters live on its device type.
        execution: Attention between ranks, and how blocks are run; None = plainly, on one rank of the context axis.
        weights: Converted to the masters' dtype once; None initialises from `train.seed`.
        precision: Instead of `train.precision`; with `fp64` masters are float64.
    """
    train, precision = config.train, precision or config.train.precision
    chunk = (execution and execution.loss_chunk_tokens) or train.loss_chunk_tokens
    stream = execution.loss_stream if execution else None
    head = ChunkedLossHead(chunk, arch.final_softcap, train.label_smoothing, train.z_loss_coeff, stream)
    core = cast(AttentionCore, execution.core if execution else local_attention(config.attention))
    with torch.device("meta"):
        model = Decoder(arch, core=core, runner=execution.runner if execution else None, loss_head=head)
    lengths: list[nn.Module] = []
    if config.adapter is not None:
        targets = adapter_targets(config.adapter, arch)
        lengths = add_adapter(model, config.adapter, targets, COMPUTE_DTYPES[precision])
    if precision == "fp64":
        model.double()
    shard(model, model.layers, mesh, precision, uncast=lengths)
    model.to_empty(device=mesh.device_type)
    if weights is None and config.adapter is None:
        init_weights(model, train.seed)
    else:
        _load(model, weights or DrawnWeights(arch, train.seed))
    if config.adapter is not None:
        init_adapter(model, train.seed)
    if train.compile:
        compile_blocks(model)
    return model.train()


def build_for_inference(
    arch: Architecture,
    weights: Weights,
    *,
    dtype: torch.dtype = torch.float32,
    attention: AttentionConfig | None = None,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder for evaluation, generation and export: plain tensors of one dtype, no gradients.

    Args:
        arch: The model.
        weights: Converted to `dtype` once.
        dtype: Of parameters and arithmetic.
        attention: Kernels; the defaults if None.
        device: Where it computes.
    """
    with torch.device("meta"):
        core = cast(AttentionCore, local_attention(attention or AttentionConfig()))
        model = Decoder(arch, core=core).to(dtype)
    model.to_empty(device=device)
    _load(model, weights)
    return model.eval().requires_grad_(False)


def model_tensors(model: Decoder) -> Mapping[str, Tensor]:
    """Whole tensors by canonical name, in the masters' dtype; tied weights once.

    **Communication**: an all-gather per sharded tensor.
    """
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def _load(model: Decoder, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        if (of_base := base_name(name)) is not None:
            fill(parameter, weights.load(of_base))


class DrawnWeights:
    """Random weights as `build_model` would draw them, whole and in float32.

    Args:
        arch: Of the model.
        seed: `train.seed`.
    """

    def __init__(self, arch: Architecture, seed: int) -> None:
        model = Decoder(arch)
        init_weights(model, seed)
        self._tensors = dict(model.named_parameters())

    def load(self, name: str) -> Tensor:
        """One tensor."""
        return self._tensors[name].detach()


def compile_blocks(model: Decoder, backend: str = "inductor") -> None:
    """Compile the token-wise parts of every block, once per shape for all layers; attention stays as it is.

    Args:
        model: To change.
        backend: Of `torch.compile`.
    """
    for block in model.layers:
        assert isinstance(block, Block)
        for part in ("pre", "keys", "post"):
            setattr(block, part, torch.compile(getattr(block, part), backend=backend, dynamic=False))
