"""AdamW over float32 masters, in two groups: what decays and what does not.

The state of every parameter exists from the start, so memory does not grow at the first update and saved state always
has the same entries.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from freight.config.schema import OptimizerConfig

FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


def decay_groups(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Split the trainable parameters into those that decay (two or more dims) and those that do not.

    Returns:
        Two mappings by canonical name: weights of linears and embeddings; norms and biases.
    """
    decaying, others = {}, {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decaying if parameter.ndim >= 2 else others)[name] = parameter
    return decaying, others


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW, fused where torch has it, with zeroed state for every trainable parameter."""
    decaying, others = decay_groups(model)
    groups = [
        {"params": list(group.values()), "weight_decay": decay}
        for group, decay in ((decaying, config.weight_decay), (others, 0.0))
        if group
    ]
    device = next(model.parameters()).device
    fused = device.type in FUSED_DEVICES
    optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    for parameter in (*decaying.values(), *others.values()):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def optimizer_state(model: nn.Module, optimizer: AdamW) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by canonical parameter name, for saving and for loading in place."""
    return {
        name: optimizer.state[parameter] for name, parameter in model.named_parameters() if parameter in optimizer.state
    }
