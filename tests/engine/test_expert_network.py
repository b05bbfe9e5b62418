"""Experts by sorted tokens give what each token gives alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from splitserve.engine.model_config import Experts
from splitserve.engine.models.expert_network import ExpertNetwork
from splitserve.engine.models.gated_network import GatedNames
from splitserve.engine.platforms import plain_platform

HIDDEN, INNER = 12, 20
NAMES = GatedNames("w1", "w3", "w2")


def network(experts: Experts, seed: int) -> tuple[ExpertNetwork, dict[str, torch.Tensor]]:
    made = ExpertNetwork(HIDDEN, experts, plain_platform(torch.device("cpu"), torch.float32), NAMES)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(to.shape, generator=generator) for name, to in made.destinations().items()}
    for name, to in made.destinations().items():
        to.copy_(weights[name])
    for linear in made.linears():
        linear.pack()
    return made, weights


def token_alone(row: torch.Tensor, experts: Experts, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each picked expert in turn, for one token."""
    shares = (weights["gate.weight"] @ row).softmax(dim=0)
    picks = sorted(range(experts.count), key=lambda number: -shares[number].item())[: experts.used]
    total = sum(shares[number].item() for number in picks) if experts.normalised else 1.0
    output = torch.zeros_like(row)
    for number in picks:
        gate, up, down = (weights[f"experts.{number}.{part}.weight"] for part in ("w1", "w3", "w2"))
        output += shares[number] / total * (down @ (silu(gate @ row) * (up @ row)))
    return output


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 9),
    count=st.integers(1, 7),
    used=st.integers(1, 7),
    normalised=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_token_gets_what_it_gets_alone(tokens: int, count: int, used: int, normalised: bool, seed: int) -> None:
    experts = Experts(count, min(used, count), INNER, normalised)
    made, weights = network(experts, seed)
    rows = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    expected = torch.stack([token_alone(row, experts, weights) for row in rows])
    torch.testing.assert_close(made(rows), expected, rtol=1e-4, atol=1e-4)


def test_a_token_that_is_not_a_number_spares_its_neighbours() -> None:
    made, _ = network(Experts(4, 2, INNER, normalised=True), 0)
    rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    sound = made(rows)
    rows[2] = torch.nan
    broken = made(rows)
    assert broken[2].isnan().all()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(broken[others], sound[others])
