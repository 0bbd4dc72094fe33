"""Weights under our names, read from stored tensors one at a time.

Names, shapes and ties are all checked when the weights are opened: whoever builds a model afterwards knows that every
tensor is there and fits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from freight.checkpoint.families import Family, Stored
from freight.checkpoint.layouts import interleaved_from_half
from freight.checkpoint.tensor_files import TensorFiles, listed
from freight.config.architecture import Architecture
from freight.errors import CheckpointError
from freight.nn.decoder import Decoder

GROWING = ("embed_tokens.weight", "head.weight")
ROTATED = re.compile(r"\.(q|k)_(proj|norm)\.")


def parameter_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the decoder's order."""
    with torch.device("meta"):
        decoder = Decoder(arch)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


def stored_groups(family: Family, names: list[str]) -> dict[str, tuple[Stored, list[str]]]:
    """Which stored tensors hold these parameters: stored name -> its form and our names, in stored order."""
    form_of = {part: stored for stored in family.modules for part in stored.parts}
    groups: dict[str, tuple[Stored, list[str]]] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", module)
        number = layer[1] if layer else ""
        stored = form_of.get(re.sub(r"^layers\.\d+\.", "layers.{i}.", module))
        if stored is None:
            raise CheckpointError(f"the family {family.name} has no place for `{name}`.")
        parts = [f"{part.replace('{i}', number)}.{kind}" for part in stored.parts]
        groups[f"{stored.name.replace('{i}', number)}.{kind}"] = (stored, parts)
    return groups


def rotary_dim(arch: Architecture) -> int:
    """Dims of a head that rotate."""
    scaling = arch.rope.scaling
    whole = scaling is not None and scaling.type == "proportional"
    return arch.dims_per_head if whole else int(arch.dims_per_head * arch.rope.percent)


class Weights:
    """Parameters by our names, lazily.

    Args:
        files: The stored tensors, under the family's names.
        family: How names and layouts translate.
        arch: What the model will be. Its vocabulary may exceed the stored one; new rows are the mean of the old.
        stored_vocab: Rows that the file itself promises.
        where: Path for messages.

    Raises:
        CheckpointError: Tensors are missing, left over, of another shape, or tied and yet different.
    """

    def __init__(self, files: TensorFiles, family: Family, arch: Architecture, stored_vocab: int, where: str) -> None:
        self._files, self._arch, self._where, self._stored_vocab = files, arch, where, stored_vocab
        self._shapes = parameter_shapes(arch)
        self._prefix = "" if any(name.startswith(family.base) for name in files.names) else family.base
        groups = stored_groups(family, list(self._shapes))
        self._place: Mapping[str, tuple[str, Stored, int]] = {
            ours: (self._name_in_file(stored_name), stored, position)
            for stored_name, (stored, parts) in groups.items()
            for position, ours in enumerate(parts)
        }
        self._check_names(family)
        self._check_shapes(groups)
        if arch.vocab_size < stored_vocab:
            raise CheckpointError(
                f"`model.vocab_size` {arch.vocab_size} is below the {stored_vocab} rows of `{where}`; rows are never "
                f"cut. Use {stored_vocab} or more."
            )

    @property
    def names(self) -> frozenset[str]:
        """Every parameter of the model."""
        return frozenset(self._shapes)

    def load(self, name: str) -> Tensor:
        """One parameter in its stored dtype (float32 where it was quantised), contiguous."""
        stored_name, stored, position = self._place[name]
        parts = stored.layout.split(self._files.read(stored_name), len(stored.parts), self._arch.dims_per_head)
        tensor = parts[position]
        if self._arch.rope.interleaved and ROTATED.search(name):
            tensor = interleaved_from_half(tensor, self._arch.dims_per_head, rotary_dim(self._arch))
        missing_rows = self._shapes[name][0] - tensor.shape[0]
        if missing_rows > 0:
            mean = tensor.double().mean(0, keepdim=True).to(tensor.dtype)
            tensor = torch.cat([tensor, mean.expand(missing_rows, -1)])
        return tensor

    def _name_in_file(self, name: str) -> str:
        return name.removeprefix(self._prefix) if self._prefix else name

    def _check_names(self, family: Family) -> None:
        wanted = {stored_name for stored_name, _, _ in self._place.values()}
        missing = sorted(wanted - self._files.names)
        if missing:
            untied = "head.weight" in self._place and self._place["head.weight"][0] in missing
            hint = " The head is stored apart only if `tie_word_embeddings` is false." if untied else ""
            raise CheckpointError(f"`{self._where}` lacks {listed(missing)} ({len(missing)} missing).{hint}")
        surplus = {name for name in self._files.names - wanted if not self._is_buffer(name, family)}
        surplus -= self._tied_copy(family)
        if surplus:
            raise CheckpointError(
                f"`{self._where}` has {listed(sorted(surplus))} ({len(surplus)} left over), for which config.json "
                "describes no place."
            )

    def _is_buffer(self, name: str, family: Family) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in family.unused)

    def _tied_copy(self, family: Family) -> set[str]:
        """A head that is stored although it is tied: allowed where it equals the embeddings."""
        if not self._arch.tie_embeddings:
            return set()
        head = next(stored.name for stored in family.modules if stored.parts == ("head",)) + ".weight"
        if head not in self._files.names:
            return set()
        embedding = self._place["embed_tokens.weight"][0]
        if not torch.equal(self._files.read(head), self._files.read(embedding)):
            raise CheckpointError(
                f"`{self._where}`: embeddings are tied, yet `{head}` and `{embedding}` differ. "
                "Set `model.tie_embeddings: false` to keep both."
            )
        return {head}

    def _check_shapes(self, groups: Mapping[str, tuple[Stored, list[str]]]) -> None:
        wrong = []
        for name, (stored, parts) in groups.items():
            shapes = [self._shapes[part] for part in parts]
            if parts[0] in GROWING:
                shapes = [(self._stored_vocab, *shapes[0][1:])]
            expected, found = stored.layout.shape(shapes), self._files.shape(self._name_in_file(name))
            if expected != found:
                wrong.append(f"{name} is {list(found)}, config.json says {list(expected)}")
        if wrong:
            raise CheckpointError(f"`{self._where}`: {'; '.join(wrong[:3])} ({len(wrong)} of wrong shape).")
