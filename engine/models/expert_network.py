"""A layer's feed-forward part as a mixture of experts: a router picks a few gated networks for each token."""

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

from splitserve.engine.model_config import Experts
from splitserve.engine.models.gated_network import GatedNames, GatedNetwork
from splitserve.engine.models.platform import Linear, Platform


class ExpertNetwork:
    """Each expert computes all of its tokens at once: tokens are sorted by expert, and back."""

    def __init__(self, hidden_size: int, experts: Experts, platform: Platform, names: GatedNames | None = None) -> None:
        self._used = experts.used
        self._normalised = experts.normalised
        # Not a projection of the platform: picks are too sensitive to be computed from narrower weights.
        self._router = platform.empty(experts.count, hidden_size)
        activate = platform.operations.silu_mul
        self._experts = [
            GatedNetwork(hidden_size, experts.intermediate_size, platform, activate, names)
            for _ in range(experts.count)
        ]

    def linears(self) -> Iterator[Linear]:
        for expert in self._experts:
            yield from expert.linears()

    def destinations(self) -> dict[str, torch.Tensor]:
        """By the Hugging Face name within the network."""
        named = {"gate.weight": self._router}
        for number, expert in enumerate(self._experts):
            named |= {f"experts.{number}.{name}": weight for name, weight in expert.destinations().items()}
        return named

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [tokens, hidden_size] in, the same shape out."""
        shares = linear(rows, self._router).float().softmax(dim=-1)
        weights, picked = shares.topk(self._used, dim=-1)  # [tokens, used]
        if self._normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        order = picked.flatten().argsort(stable=True)  # of all picks, by expert
        sorted_rows = rows.index_select(0, order // self._used)
        counts = torch.bincount(picked.flatten(), minlength=len(self._experts)).tolist()
        outputs = torch.empty_like(sorted_rows)
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                outputs[start : start + count] = expert(sorted_rows[start : start + count])
            start += count
        # Summed per token in the order of its picks: neighbours in the batch do not change the result's rounding here.
        picks = torch.empty_like(outputs).index_copy_(0, order, outputs).view(*picked.shape, -1)
        return torch.bmm(weights.to(rows.dtype)[:, None], picks)[:, 0]
