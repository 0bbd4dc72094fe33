"""Files that hold named tensors: safetensors, whole or in parts. Read lazily, one tensor at a time, never unpickled.

Every file is opened and its header read before a name is believed, so damage is found before anything is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from freight.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


class TensorFiles(Protocol):
    """Named tensors on disk."""

    @property
    def names(self) -> Set[str]:
        """Stored names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, without reading the data."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor in its stored dtype; quantised ones in float32."""
        ...


class SafetensorsFolder:
    """The weights of a Hugging Face folder.

    Raises:
        CheckpointError: A file is missing or damaged, or the index and the files disagree.
    """

    def __init__(self, folder: Path) -> None:
        self._file_of = self._index(folder)
        self._open = {path: _open(path) for path in sorted(set(self._file_of.values()))}
        for path, file in self._open.items():
            promised = {name for name, where in self._file_of.items() if where == path}
            if absent := sorted(promised - set(file.keys())):
                raise CheckpointError(f"`{path}` lacks {listed(absent)}, which `{INDEX}` places there.")

    @staticmethod
    def _index(folder: Path) -> dict[str, Path]:
        single = folder / SINGLE
        if single.exists():
            return dict.fromkeys(_open(single).keys(), single)
        index = read_json(folder / INDEX)
        places = index.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise CheckpointError(f"`{folder / INDEX}` has no `weight_map` of tensor names to files.")
        return {name: folder / Path(place).name for name, place in places.items()}

    @property
    def names(self) -> Set[str]:
        """Stored names."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, from the header."""
        return tuple(self._open[self._file_of[name]].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The tensor, in its stored dtype."""
        return self._open[self._file_of[name]].get_tensor(name)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds safetensors weights.

    Raises:
        CheckpointError: It holds only pickled weights, or parts without their index.
    """
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return True
    if parts := sorted(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"`{folder}` has {parts[0].name} but neither {SINGLE} nor {INDEX}. Restore the index, or rename a single "
            f"file to {SINGLE}."
        )
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    pickled = [name for name in pickled if name not in ("training_args.bin", "optimizer.pt", "scheduler.pt")]
    if pickled:
        raise CheckpointError(
            f"`{folder / pickled[0]}` is a pickle, which can run code when it is read. Convert it where you trust it: "
            f'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    return False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: The file is missing, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise CheckpointError(f"`{path}` is not JSON: {error}.") from None
    if not isinstance(value, Mapping):
        raise CheckpointError(f"`{path}` must hold a JSON object; got {type(value).__name__}.")
    return dict(value)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"`{path}` is missing, though `{INDEX}` names it.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"`{path}` is not a whole safetensors file ({error}). Download or export it again."
        ) from None


def listed(names: list[str]) -> str:
    """A few names and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
