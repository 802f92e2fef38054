"""DeAR in 60 lines: the idea of this package, without what makes it exact, fast and safe in real training.

    torchrun --nproc-per-node 2 docs/toy_dear.py

Plain data parallelism sums each gradient over all ranks with an all-reduce, which can overlap only with the rest of the
same backward pass. An all-reduce is a reduce-scatter (each rank gets the sum of one slice) followed by an all-gather
(each rank gets the slices of the others). DeAR runs the reduce-scatter during backward and the all-gather during the
*next* forward, shortly before a layer is used. So both passes hide communication.

Source: DeAR, arXiv 2302.12445.
"""

import torch
import torch.distributed as dist
from torch import nn

LEARNING_RATE = 0.1


class ToyDear:
    """Trains the layers of ``net`` with SGD; each layer's gradients travel together, as one flat buffer."""

    def __init__(self, net: nn.Sequential) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.layers = [layer for layer in net if list(layer.parameters())]
        self.scattered: dict[nn.Module, tuple[dist.Work, list[torch.Tensor]]] = {}
        self.missing: dict[nn.Module, int] = {}
        for layer in self.layers:
            self.missing[layer] = len(list(layer.parameters()))
            layer.register_forward_pre_hook(self.before_forward_of)
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _, layer=layer: self.gradient_arrives(layer))

    def gradient_arrives(self, layer: nn.Module) -> None:
        """During backward: the last gradient of a layer starts the layer's reduce-scatter, and backward goes on."""
        self.missing[layer] -= 1
        if self.missing[layer]:
            return
        self.missing[layer] = len(list(layer.parameters()))
        flat = torch.cat([parameter.grad.flatten() for parameter in layer.parameters()])
        flat = nn.functional.pad(flat, (0, -len(flat) % self.world_size)) / self.world_size
        # gloo exchanges the slices; adding them up makes this a reduce-scatter.
        slices = list(torch.empty_like(flat).chunk(self.world_size))
        self.scattered[layer] = dist.all_to_all(slices, list(flat.chunk(self.world_size)), async_op=True), slices

    def before_forward_of(self, layer: nn.Module, _: object) -> None:
        """During the next forward: gather the layer's gradients and update the layer, just before it is used."""
        if layer not in self.scattered:
            return  # the first forward of all
        work, slices = self.scattered.pop(layer)
        work.wait()
        flat = torch.empty(len(slices) * len(slices[0]))
        dist.all_gather(list(flat.chunk(self.world_size)), sum(slices))  # the real one starts a layer earlier
        with torch.no_grad():
            for parameter in layer.parameters():
                gradient, flat = flat[: parameter.numel()], flat[parameter.numel() :]
                parameter -= LEARNING_RATE * gradient.view_as(parameter)
                parameter.grad = None


def train(with_dear: bool) -> list[torch.Tensor]:
    """Ten steps on random data, which differ between ranks; returns the parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    dear = ToyDear(net) if with_dear else None
    model = net if with_dear else nn.parallel.DistributedDataParallel(net)
    optimizer = None if with_dear else torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(10):
        model(torch.randn(16, 8)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    for layer in dear.layers if dear is not None else []:
        dear.before_forward_of(layer, None)  # the last updates, for which no forward comes
    return [parameter.detach() for parameter in net.parameters()]


def main() -> None:
    """Compare it with plain DDP."""
    dist.init_process_group("gloo")
    pairs = zip(train(with_dear=True), train(with_dear=False), strict=True)
    difference = max((ours - plain).abs().max().item() for ours, plain in pairs)
    if dist.get_rank() == 0:
        print(f"largest difference to plain DDP after ten steps: {difference:.1e}")
    dist.destroy_process_group()
    assert difference < 1e-6


if __name__ == "__main__":
    main()
