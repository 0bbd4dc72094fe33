"""The linear module of every projection; adapters, importers and tensor parallelism find it as an `nn.Linear`."""

from __future__ import annotations

from torch import Tensor, nn

from freight.ops.batch import TokenRange
from freight.ops.linear import linear


class Linear(nn.Linear):
    """`nn.Linear` whose bfloat16 GEMMs are fast on any CPU (`ops/linear.py`); built without values."""

    def reset_parameters(self) -> None:
        """Nothing: `init_weights` or an importer fills the parameters, once."""

    def forward(self, input: Tensor, tokens: TokenRange | None = None) -> Tensor:
        """`[tokens, in_features]` -> `[tokens, out_features]`.

        Args:
            input: Hidden states.
            tokens: Which tokens they are, for modules that stand in for this one (an adapter's dropout).
        """
        return linear(input, self.weight, self.bias)
