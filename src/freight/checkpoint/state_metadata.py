"""The index of a saved state, read without letting it run code.

torch.distributed.checkpoint keeps the index of its tensors as a pickle. Tensors themselves are read with
`weights_only`; for the index, only the plain classes that it is made of are let through.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from freight.errors import CheckpointError

ALLOWED = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name when written by Python 3.13
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


class StateReader(FileSystemReader):
    """Reads the tensors of a saved state; its index may hold nothing but plain descriptions.

    Raises:
        CheckpointError: The index is damaged or asks for code.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with (path / ".metadata").open("rb") as file:
                self._metadata: Metadata = _PlainUnpickler(file).load()
            self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise CheckpointError(f"`{path / '.metadata'}` is not the index of a saved state: {error}.") from None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        return self._metadata

    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Global shape and dtype of every saved tensor."""
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
