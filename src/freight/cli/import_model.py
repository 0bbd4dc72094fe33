"""`freight import`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from freight.cli.exits import remark, say

if TYPE_CHECKING:
    from freight.config.architecture import Architecture

Dtype = Literal["bf16", "fp16", "fp32"]


def import_model(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder, .gguf file or config.json.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="Of the weights written.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Of random weights, where the source has only a config.json.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Read a model and write it as a Hugging Face folder that Freight and transformers load."""
    from freight.assemble.stored_model import convert_model
    from freight.checkpoint.hf_import import open_weights, read_architecture
    from freight.train.console import Progress

    arch = read_architecture(source)
    if open_weights(source, arch) is None:
        remark(f"{source}: a config without weights; they are drawn from seed {seed}")
        _random(arch, output, dtype, seed, force)
    else:
        with Progress() as progress:
            convert_model(source, output, dtype=dtype, force=force, progress=progress)
    say(
        f"{output}: {arch.family or 'llama'}, {arch.num_layers} layers, hidden {arch.hidden_size}, "
        f"{arch.num_attention_heads} heads of {arch.dims_per_head}, {arch.groups} KV heads, vocabulary "
        f"{arch.vocab_size:,}, {arch.max_position_embeddings:,} positions, {dtype}"
    )


def _random(arch: Architecture, output: Path, dtype: Dtype, seed: int, force: bool) -> None:
    from freight.checkpoint.hf_export import export_model
    from freight.nn.decoder import Decoder
    from freight.nn.init import init_weights

    model = Decoder(arch)
    init_weights(model, seed)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    export_model(tensors, arch, output, dtype=dtype, tokenizer=None, force=force)
