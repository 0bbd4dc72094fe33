"""GGUF files: transformers' tables say what a key or tensor means; the gguf package reads and de-quantises.

`transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint` reads every tensor at once and the header once per call,
which takes seconds each time because every vocabulary entry becomes an array object. Here the vocabulary is stepped
over and tensors are de-quantised when asked for: reading SmolLM2-135M's header takes 0.1 s instead of several.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Set
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, GGUFValueType, dequantize, get_tensor_name_map
from torch import Tensor
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from freight.checkpoint.families import FAMILIES
from freight.errors import CheckpointError

# GGUF keys that transformers 5.24 does not read, though the families need them.
EXTRA_KEYS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA2_27B_LAYERS = 46  # its query scale comes from hidden / heads, which only llama.cpp's source says


class _HeaderReader(GGUFReader):
    """Steps over arrays (vocabulary, merges, token types) without an object for each entry."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        buffer = self.data.data
        kind, count = struct.unpack_from("<IQ", buffer, orig_offs)
        offset = orig_offs + 12
        if kind == GGUFValueType.STRING:
            for _ in range(count):
                offset += 8 + struct.unpack_from("<Q", buffer, offset)[0]
        else:
            offset += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(kind)]).itemsize
        return offset - orig_offs, [], [], [GGUFValueType.ARRAY]


class GgufFile:
    """A GGUF file as a config.json mapping and tensors under their Hugging Face names.

    Raises:
        CheckpointError: The file is damaged, or of an architecture that transformers cannot read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_magic()
        try:
            reader = _HeaderReader(path)
        except Exception as error:  # the reader fails in many ways on a cut file, all of them damage
            raise CheckpointError(f"`{path}` is not a whole GGUF file ({error}). Download it again.") from None
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = {key: field.contents() for key, field in reader.fields.items() if field.data}
        self.architecture = str(self._fields.get("general.architecture"))
        self._refuse_scaled_rope()

    def _check_magic(self) -> None:
        try:
            with self.path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise CheckpointError(f"`{self.path}` cannot be read: {error.strerror or error}.") from None
        if magic != b"GGUF":
            raise CheckpointError(f"`{self.path}` is not a GGUF file: it begins with {magic!r}, not b'GGUF'.")

    def _refuse_scaled_rope(self) -> None:
        kind = self._fields.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind != "none" or "rope_freqs.weight" in self._stored:
            raise CheckpointError(
                f"`{self.path}` has scaled rotary embeddings, which GGUF stores only as finished numbers. "
                "Use the model's Hugging Face folder."
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """What config.json would say."""
        keys = GGUF_CONFIG_MAPPING.get(self.architecture)
        if keys is None or self._model_type() not in FAMILIES or "token_embd.weight" not in self._stored:
            raise CheckpointError(f"`{self.path}`: GGUF architecture {self.architecture!r} is not supported.")
        config: dict[str, Any] = {"model_type": self._model_type()}
        for key, name in {**keys, **EXTRA_KEYS}.items():
            value = self._fields.get(f"{self.architecture}.{key}")
            if name and value is not None:
                config[name] = value
        config["vocab_size"] = self.shape_of_stored("token_embd.weight")[0]
        config["tie_word_embeddings"] = "output.weight" not in self._stored
        if self.architecture == "gpt2":
            config["n_positions"] = config.pop("n_ctx", None) or 1024
            config["n_inner"] = config.pop("feed_forward_length", None)
        if self.architecture == "gemma2":
            per_head = config["hidden_size"] / config["num_attention_heads"]
            of_27b = config["num_hidden_layers"] == GEMMA2_27B_LAYERS
            config["query_pre_attn_scalar"] = per_head if of_27b else config.get("head_dim", 256)
        if config["model_type"] == "mistral":
            config.setdefault("sliding_window", None)
        return config

    def _model_type(self) -> str:
        """llama.cpp calls Mistral llama; only a window, or the name as transformers compares it, tells them apart."""
        window = self._fields.get(f"{self.architecture}.attention.sliding_window")
        mistral = window or self._fields.get("general.name") == "mistral"
        return "mistral" if self.architecture == "llama" and mistral else self.architecture

    @property
    def names(self) -> Set[str]:
        """Hugging Face names of the tensors in the file."""
        return self._stored_name.keys()

    def shape_of_stored(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor under its GGUF name, rows first."""
        return tuple(int(size) for size in reversed(self._stored[name].shape))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape under the Hugging Face name, from the header."""
        shape = self.shape_of_stored(self._stored_name[name])
        conv1d = self.architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name)
        return shape[::-1] if conv1d else shape

    def read(self, name: str) -> Tensor:
        """The tensor in float32, de-quantised, rows of q and k back in Hugging Face order."""
        stored = self._stored[self._stored_name[name]]
        weights = dequantize(stored.data, stored.tensor_type)
        if stored.name != "output.weight":  # nothing to do, and GPT-2's processor would take it for attn_output
            weights = self._processor.process(weights, stored.name).weights
        return torch.from_numpy(np.require(weights, np.float32, ["C", "W"]))

    @cached_property
    def _processor(self) -> Any:
        return TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)(config=self.config)

    @cached_property
    def _stored_name(self) -> dict[str, str]:
        """Hugging Face name -> GGUF name, by the gguf package's map; names that it does not know stay as they are."""
        architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        layers = int(self.config.get("num_hidden_layers") or self.config.get("n_layer") or 0)
        names = get_tensor_name_map(architecture, layers)
        theirs: dict[str, str] = {}
        for module in FAMILIES[self.config["model_type"]].modules:
            for stem in {module.name.replace("{i}", str(layer)) for layer in range(layers)}:
                for kind in (".weight", ".bias"):
                    theirs[f"{names.get_name(stem)}{kind}"] = f"{stem}{kind}"
        return {theirs.get(name, name): name for name in self._stored}
