"""What only a CUDA device can show: real CUDA graphs, and NCCL with one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from preamp import Headroom
from preamp.torch import GradScaler, ShardedGradScaler

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

INF = math.inf
FACTORS = (1.0, 1.0, INF, 1.0, INF, INF, 1.0, 1.0, 1.0, 1.0)
RULE: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
KINDS: dict[str, Any] = {
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, capturable=True),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Training:
    """A network, its optimizer and a scaler; the loss of each step is multiplied by `factor`."""

    def __init__(self, kind: str, scaler: Any, max_norm: float | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
        self.inputs = torch.linspace(-1.0, 1.0, 512, device="cuda").view(8, 64)
        self.factor = torch.ones((), device="cuda")
        self.optimizer = KINDS[kind](self.model.parameters())
        self.scaler, self.max_norm = scaler, max_norm

    def iteration(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.inputs).square().mean() * self.factor
        self.scaler.scale(loss).backward()
        if isinstance(self.scaler, GradScaler):
            self.scaler.step(self.optimizer, max_norm=self.max_norm)
        else:
            if self.max_norm is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def captured(training: Training, warm_up: int) -> torch.cuda.CUDAGraph:
    """Return a graph of one iteration, after some that ran on a stream beside, as PyTorch asks for."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(warm_up):
            training.iteration()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.iteration()
    return graph


def assert_replayed_as(mine, other):
    """Assert that a graph of one training does what another does step by step."""
    graph = captured(mine, warm_up=3)
    for _ in range(3):
        other.iteration()
    for factor in FACTORS:
        mine.factor.fill_(factor)
        other.factor.fill_(factor)
        graph.replay()
        other.iteration()
        assert mine.scaler.get_scale() == other.scaler.get_scale()
        torch.testing.assert_close(mine.weights(), other.weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_graph_that_is_replayed_trains_as_pytorchs_scaler_does(kind, max_norm):
    mine = Training(kind, GradScaler(**RULE, capturable=True), max_norm)
    theirs = Training(kind, torch.amp.GradScaler("cuda", **RULE), max_norm)
    assert_replayed_as(mine, theirs)
    assert mine.scaler.policy_state.scale != RULE["init_scale"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_graph_with_a_policy_that_sees_trains_as_without_a_graph(kind):
    policy = Headroom(init_scale=2.0**10, memory=2, patience=4)
    mine = Training(kind, GradScaler(policy=policy, capturable=True), 0.01)
    plain = Training(kind, GradScaler(policy=policy), 0.01)
    assert_replayed_as(mine, plain)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_fused_step_on_the_device_reads_nothing():
    training = Training("AdamW fused", GradScaler(**RULE), 0.01)
    for _ in range(3):
        training.iteration()
    try:
        torch.cuda.set_sync_debug_mode("error")
        training.iteration()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert training.scaler.last_step is not None


@pytest.fixture
def nccl(tmp_path):
    if not dist.is_nccl_available():
        pytest.skip("this PyTorch is built without NCCL")
    place = f"file://{tmp_path}/ranks"
    dist.init_process_group("nccl", init_method=place, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "make", [ShardedGradScaler, lambda **options: GradScaler(process_group="world", **options)]
)
@pytest.mark.parametrize("policy", [None, Headroom(init_scale=2.0**10, memory=2, patience=4)])
@pytest.mark.parametrize("kind", ["AdamW fused", "SGD"])
def test_one_rank_of_nccl_agrees_with_itself(nccl, kind, policy, make):
    options = RULE if policy is None else {"policy": policy}
    together, alone = Training(kind, make(**options), 0.01), Training(kind, GradScaler(**options), 0.01)
    for factor in FACTORS:
        for training in (together, alone):
            training.factor.fill_(factor)
            training.iteration()
        assert together.scaler.last_step.skipped == alone.scaler.last_step.skipped == (factor == INF)
        torch.testing.assert_close(together.weights(), alone.weights(), rtol=1e-5, atol=1e-6)
