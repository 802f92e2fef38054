"""Models come and go: sweeps, tests, notebooks. What a model leaves behind when its last user drops it, not detached.

In scripts of their own, which must end well, too: a notebook has shown an exception (`sys.last_type`) and goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from script_server import ScriptServer

_SWEEP = """
import gc, json, os, sys, threading
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch._dynamo.callback import callback_handler
import ddp_crossover as dx

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=world_size)

def new_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))

def new_optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

def train(model, optimizer, steps=5):
    for index in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * index + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

def hooks_on(net, optimizer):
    owners = [vars(one) for one in (*net.modules(), optimizer)]
    hooks = [held for owner in owners for name, held in owner.items() if name.endswith("hooks") and held]
    return sum(map(len, hooks)) + sum(len(p._backward_hooks or ()) for p in net.parameters())

def figures(net, optimizer):
    # Threads: not as the system counts them, for which one that was joined may be there a little longer; and but for
    # those that wait for legs, which are as many as there happen to be legs.
    with open("/proc/self/statm") as file:
        resident_mb = int(file.read().split()[1]) * 4096 / 2**20
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sum("-wait" not in thread.name for thread in threading.enumerate()),
        "hooks": hooks_on(net, optimizer),
        "callbacks": sum(len(held) for held in vars(callback_handler).values() if isinstance(held, list)),
        "resident_mb": resident_mb,
    }

def show_an_exception():
    # As IPython does.
    try:
        raise ZeroDivisionError("shown")
    except ZeroDivisionError:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()

def write(value):
    with open(f"answer{rank}", "w") as file:
        json.dump(value, file)
"""


@pytest.fixture
def answers(script_server: ScriptServer, tmp_path: Path):
    """Runs what follows `_SWEEP` on ranks; what each has written."""

    def run(rest: str, world_size: int) -> list:
        ends = script_server.run(_SWEEP + rest, tmp_path, world_size, timeout_s=300)
        assert [end.exitcode for end in ends] == [0] * world_size, ends
        return [json.loads((tmp_path / f"answer{rank}").read_text()) for rank in range(world_size)]

    return run


def _assert_flat(seen: list[dict[str, float]]) -> None:
    """After the first three."""
    settled = {name: max(one[name] for one in seen[:3]) for name in seen[0]}
    for index, one in enumerate(seen[3:], 3):
        for name, value in one.items():
            allowance = 24 if name == "resident_mb" else 0
            assert value <= settled[name] + allowance, f"{name} after model {index}: {value}, not {settled[name]}"


_MANY = """
def one_model():
    net = new_network()
    optimizer = new_optimizer(net)
    model = DistributedDataParallel(net)
    dx.attach(model, optimizer, fusion_mb=0.05)
    train(model, optimizer)
    return net, optimizer

seen = []
for index in range(40):
    if index == 20:
        show_an_exception()
    seen.append(figures(*one_model()))
write(seen)
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_forty_models_leave_nothing_behind(answers, world_size) -> None:
    for seen in answers(_MANY, world_size):
        _assert_flat(seen)


_KEPT = """
net = new_network()
optimizer = new_optimizer(net)
seen = []
fallbacks = []
for index in range(12):
    # In the order of a cell of a notebook: the old model is there until the new one has been made.
    model = DistributedDataParallel(net)
    state = dx.attach(model, optimizer, fusion_mb=0.05)
    train(model, optimizer, 6)
    fallbacks += list(state.stats().fallbacks)
    if index == 6:
        show_an_exception()
    seen.append(figures(net, optimizer))
write([seen, fallbacks])
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_network_that_is_wrapped_again_and_again_is_as_new(answers, world_size) -> None:
    """Its optimizer, too; and its updates are deferred each time."""
    for seen, fallbacks in answers(_KEPT, world_size):
        _assert_flat(seen)
        assert not fallbacks


_LAST_UPDATE = """
def train_and_drop(plain):
    net = new_network()
    optimizer = new_optimizer(net)
    model = DistributedDataParallel(net)
    if not plain:
        dx.attach(model, optimizer, fusion_mb=0.05)
    train(model, optimizer, 8)
    return net, optimizer

def values(net, optimizer):
    gradients = [p.grad for p in net.parameters()]
    assert all(type(gradient) is torch.Tensor for gradient in gradients)
    momenta = [of_parameter["momentum_buffer"] for of_parameter in optimizer.state.values()]
    return [value.tolist() for value in (*net.state_dict().values(), *gradients, *momenta)]

show_an_exception()
ours = train_and_drop(plain=False)
types = [type(p) is nn.Parameter for p in ours[0].parameters()]
write([all(types), values(*ours) == values(*train_and_drop(plain=True))])
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_of_a_dropped_model_have_their_last_update(answers, world_size) -> None:
    assert answers(_LAST_UPDATE, world_size) == [[True, True]] * world_size
