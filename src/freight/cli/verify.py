"""`freight verify`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from freight.cli.exits import FAILED, complain, say
from freight.cli.inputs import ConfigPath, Overrides, read_config
from freight.errors import ConfigError

if TYPE_CHECKING:
    from freight.verify.case import Dtype

A_RANK_FAILED, TOO_LARGE = 3, 4
DEVICES, DTYPES = ("cpu", "cuda"), ("fp64", "fp32", "bf16")


def verify(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(help="Processes of your run; as few as the config needs.", min=1)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="fp64 (exact), fp32 or bf16 (looser).")] = "fp64",
    keep: Annotated[list[str] | None, typer.Option(help="A key that keeps its value in the small run.")] = None,
    full_mesh: Annotated[bool, typer.Option("--full-mesh", help="Keep the number of ranks, up to 8.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    sabotage: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show that a config computes what plain PyTorch computes. Exit codes: 0 equal, 1 different, 2 wrong config.

    Runs a small twin of the config on processes of this machine and compares every number with one plain process.
    Also exits with 3 if a rank failed, and with 4 if the twin would be too large for this machine.
    """
    checked = _dtype_on(device, dtype)
    loaded = read_config(config, overrides, check_files=False, world_size=ranks)
    import torch

    from freight.assemble.adapters import targets_for
    from freight.assemble.build import architecture_for
    from freight.config.checks import fit_faults
    from freight.config.model_checks import architecture_faults
    from freight.train.console import Progress
    from freight.verify.prove import Prover
    from freight.verify.ranks import RankError, RankPool
    from freight.verify.report import as_json as json_of
    from freight.verify.report import report_lines
    from freight.verify.sabotage import check_sabotage
    from freight.verify.shrink import MOST_RANKS, ShrinkError

    check_sabotage(sabotage, loaded)
    arch = architecture_for(loaded)
    if faults := [*architecture_faults(arch), *fit_faults(loaded, arch)]:
        raise ConfigError(*faults)
    targets_for(loaded, arch)
    torch.set_num_threads(1)  # the reference's tensors are too small to share
    try:
        with RankPool(MOST_RANKS, loaded.parallel.timeout_seconds) as pool, Progress() as progress:
            proof = Prover(pool, sabotage, progress).prove(
                loaded,
                arch,
                ranks=ranks,
                keep=keep or (),
                full_mesh=full_mesh,
                dtype=checked,
                device=device,
            )
    except ShrinkError as error:
        complain(str(error).split("\n"))
        raise typer.Exit(TOO_LARGE) from None
    except RankError as error:
        complain([error.summary])
        raise typer.Exit(A_RANK_FAILED) from None
    if as_json:
        say(json.dumps(json_of(proof)))
    else:
        for line in report_lines(proof):
            say(line)
    raise typer.Exit(0 if proof.equal else FAILED)


def _dtype_on(device: str, dtype: str) -> Dtype:
    """The dtype, if device and dtype are there.

    Raises:
        ConfigError: One of them is not.
    """
    if device not in DEVICES:
        raise ConfigError(f"`--device` must be {' or '.join(DEVICES)}; got {device}. Use cpu for the exact proof.")
    for known in ("fp64", "fp32", "bf16"):
        if dtype == known:
            break
    else:
        raise ConfigError(f"`--dtype` must be one of {', '.join(DTYPES)}; got {dtype}. Use fp64 for the exact proof.")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("`--device cuda`: there is no CUDA device here. Leave it out to verify on the CPU.")
    return known
