"""An adapter that a run has trained: read from its saved state, merged into its base, or written as peft reads it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from freight.assemble.adapters import adapter_targets, add_adapter, base_name
from freight.assemble.build import DrawnWeights, Weights, weights_for
from freight.checkpoint import saved_state
from freight.checkpoint.adapter_files import AdapterTensors, scale_of, write_adapter
from freight.checkpoint.frozen_weights import check_frozen, digest
from freight.checkpoint.hf_import import read_architecture
from freight.config.architecture import Architecture
from freight.config.schema import AdapterConfig, Config
from freight.errors import CheckpointError
from freight.nn.decoder import Decoder
from freight.parallel.data import COMPUTE_DTYPES


class TrainedAdapter:
    """An adapter in a saved state, and the base it belongs to; a tensor is read when it is asked for.

    Args:
        checkpoint: A saved state that has been verified.
        config: Of the run.
        arch: Of the run.
        digests: Of the frozen weights, from the saved state.

    Raises:
        CheckpointError: The base is gone.
    """

    def __init__(self, checkpoint: Path, config: Config, arch: Architecture, digests: Mapping[str, str]) -> None:
        assert config.adapter is not None
        self._checkpoint, self._config, self._arch = checkpoint, config, arch
        self._digests = {base_name(name) or name: value for name, value in digests.items()}
        self.adapter: AdapterConfig = config.adapter
        self.base_path: str | None = config.model.hf
        self.base: Weights = weights_for(config, arch) or DrawnWeights(arch, config.train.seed)

    @cached_property
    def tensors(self) -> AdapterTensors:
        """What was trained, in float32."""
        with torch.device("meta"):
            model = Decoder(self._arch)
        add_adapter(model, self.adapter, adapter_targets(self.adapter, self._arch), torch.float32)
        trained = {name: torch.empty(t.shape) for name, t in model.named_parameters() if t.requires_grad}
        state: dict[str, Any] = {"model": trained}
        saved_state.load(self._checkpoint, state, verified=True)
        return AdapterTensors.from_parameters(state["model"])

    def load(self, name: str) -> Tensor:
        """A weight with the adapter merged into it: what the trained model computes with.

        Raises:
            CheckpointError: The base's weight is not the one that was trained on.
        """
        if name in self.tensors.full:
            return self.tensors.full[name]
        weight = self._of_base(name)
        pair = self.tensors.low_rank.get(name.removesuffix(".weight"))
        return weight if pair is None or name.endswith(".bias") else pair.merged(weight, scale_of(self.adapter))

    def _of_base(self, name: str) -> Tensor:
        weight = self.base.load(name)
        held = weight.to(COMPUTE_DTYPES[self._config.train.precision])
        check_frozen({name: digest(held)}, self._digests, self._config.model.hf or "train.seed")
        return weight

    def write(self, output: Path, dtype: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Write the folder that peft loads onto the base.

        Raises:
            CheckpointError: The base alone, as transformers loads it, is not the model that was adapted.
        """
        base = Path(self._config.model.hf or "").expanduser().absolute()
        if self._config.model.hf is None or base.is_file():
            what = "random weights" if self._config.model.hf is None else f"the file {base}"
            raise CheckpointError(
                f"the adapter's base is {what}, which peft cannot load. Export the whole model with --merge."
            )
        was, now = _what_computes(read_architecture(base)), _what_computes(self._arch)
        for key in was.keys() | now.keys():
            if was.get(key) != now.get(key):
                raise CheckpointError(
                    f"the adapter was trained with `model.{key}` {now.get(key)}, but its base {base} has "
                    f"{was.get(key)}: there it would compute something else. Export the whole model with --merge."
                )
        write_adapter(
            self.tensors,
            self.adapter,
            self._arch,
            output,
            base=str(base),
            load=self._of_base,
            dtype=dtype,
            tokenizer=tokenizer,
        )


def _what_computes(arch: Architecture) -> dict[str, Any]:
    """The fields that decide what a trained model computes, as `key` or `rope.key`."""
    fields = arch.model_dump(exclude={"family", "attention_dropout", "init_std"})
    out = {
        f"{name}.{key}": value
        for name in fields
        if name.startswith("rope")
        for key, value in (fields[name] or {}).items()
    }
    out |= {name: value for name, value in fields.items() if not name.startswith("rope")}
    if arch.position_embedding == "rope" and arch.rope.scaling is None:
        del out["max_position_embeddings"]  # rotations go on for ever
    return {key: value for key, value in out.items() if not key.endswith(".interleaved")}  # an order of storage
