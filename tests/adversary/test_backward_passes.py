"""Several losses, several backward passes, gradients of gradients, gradients of inputs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from adversarial import ALIASED, GRADIENTS_READ, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(three=True)
def test_pgd_attack_before_each_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        attacked = x.clone()
        for _ in range(3):
            attacked.requires_grad_()
            (slope,) = torch.autograd.grad(mse(model.module(attacked), y), attacked)
            attacked = (attacked + 0.02 * slope.sign()).clamp(x - 0.1, x + 0.1).detach()
        run.log(train_step(model, optimizer, attacked, y))


@adversarial()
def test_fgsm_by_a_backward_through_the_ddp(run: Script) -> None:
    """The attack's backward fills the gradients, which are cleared afterwards."""
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        x.requires_grad_()
        mse(model(x), y).backward()
        attacked = (x + 0.05 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = mse(model(attacked), y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_l1_and_l2_from_a_list_of_parameters_in_the_loss(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    params = list(net.parameters())
    for x, y in run.batches():
        optimizer.zero_grad()
        penalty = sum(p.abs().sum() for p in params) * 1e-3 + sum(p.pow(2).sum() for p in params) * 1e-2
        loss = mse(model(x), y) + penalty
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_elastic_weight_consolidation(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05, momentum=0.9)
    anchor: dict[str, torch.Tensor] = {}
    fisher: dict[str, torch.Tensor] = {}
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        for n, p in net.named_parameters():
            if n in anchor:
                loss = loss + (fisher[n] * (p - anchor[n]) ** 2).sum()
        loss.backward()
        optimizer.step()
        run.log(loss)
        if step == 6:
            anchor = {n: p.detach().clone() for n, p in net.named_parameters()}
            fisher = {n: p.grad.detach() ** 2 for n, p in net.named_parameters()}


@adversarial(three=True)
def test_maml_inner_loop_on_fast_weights(run: Script) -> None:
    from torch.func import functional_call

    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            fast = dict(self.net.named_parameters())
            for _ in range(2):
                inner = mse(functional_call(self.net, fast, (x,)), y)
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {n: p - 0.1 * s for (n, p), s in zip(fast.items(), slopes, strict=True)}
            return mse(functional_call(self.net, fast, (x.flip(0),)), y.flip(0))

    model, optimizer = run.train(Meta(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_reptile_moves_towards_a_copy_that_was_trained(run: Script) -> None:
    import copy

    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.05)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        fast = copy.deepcopy(net)
        inner = SGD(fast.parameters(), lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            mse(fast(x[:4]), y[:4]).backward()
            inner.step()
        with torch.no_grad():
            for p, f in zip(net.parameters(), fast.parameters(), strict=True):
                dist.all_reduce(f.data)
                p.add_(f.data / run.world_size - p, alpha=0.3)


@adversarial(three=True)
def test_contrastive_loss_over_gathered_features(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, _ in run.batches():
        x = x[:4]
        z = F.normalize(model(torch.cat([x, x + 0.1])), dim=1)
        one, two = z.chunk(2)
        everywhere = [torch.zeros_like(two) for _ in range(run.world_size)]
        dist.all_gather(everywhere, two.detach())
        everywhere[run.rank] = two
        logits = one @ torch.cat(everywhere).T / 0.1
        loss = F.cross_entropy(logits, torch.arange(4) + 4 * run.rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_backward_with_inputs_skips_a_layer(run: Script) -> None:
    """Only the named parameters get a gradient, DDP hears of the others through find_unused_parameters."""
    net = mlp()
    model = run.ddp(net, find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward(inputs=list(net.parameters()))
        optimizer.step()
        run.log(loss)


@adversarial()
def test_anomaly_detection_and_saved_tensor_hooks(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True):
            loss = mse(model(x), y)
            loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_forward_mode_derivative_between_steps(run: Script) -> None:
    from torch.func import functional_call, jvp

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        weights = dict(net.named_parameters())
        directions = {n: torch.ones_like(p) for n, p in weights.items()}
        run.log(jvp(lambda w, x=x: functional_call(net, w, (x,)), (weights,), (directions,))[1])


@adversarial(three=True)
def test_trades_loss_with_an_attack_in_eval_mode(run: Script) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model = run.ddp(net, broadcast_buffers=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    for x, y in run.batches():
        model.eval()
        clean = net(x).softmax(1).detach()
        bad = x + 0.001 * torch.randn_like(x)
        for _ in range(2):
            bad.requires_grad_()
            loss = F.kl_div(net(bad).log_softmax(1), clean, reduction="sum")
            bad = (bad + 0.01 * torch.autograd.grad(loss, bad)[0].sign()).detach()
        model.train()
        optimizer.zero_grad()
        out = model(torch.cat([x, bad]))
        loss = mse(out[: len(x)], y) + F.kl_div(out[len(x) :].log_softmax(1), clean, reduction="batchmean")
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_free_adversarial_training_replays_each_batch(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.05, momentum=0.9)
    delta = torch.zeros(1, 8)
    for x, y in run.batches(6):
        for _ in range(3):
            noise = delta.clone().requires_grad_()
            optimizer.zero_grad()
            loss = mse(model(x + noise), y)
            loss.backward()
            optimizer.step()
            delta = (delta + 0.02 * noise.grad.sign()).clamp(-0.1, 0.1)
            run.log(loss)


@adversarial()
def test_virtual_adversarial_training_with_power_iteration(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        with torch.no_grad():
            clean = model.module(x).softmax(1)
        d = F.normalize(torch.randn_like(x), dim=1)
        d.requires_grad_()
        (g,) = torch.autograd.grad(F.kl_div(model.module(x + 0.1 * d).log_softmax(1), clean, reduction="sum"), d)
        optimizer.zero_grad()
        out = model(torch.cat([x, x + 0.5 * F.normalize(g, dim=1)]))
        loss = mse(out[: len(x)], y) + F.kl_div(out[len(x) :].log_softmax(1), clean, reduction="batchmean")
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_mixup_and_manifold_mixup_with_random_layer(run: Script) -> None:
    import random

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])

        def forward(self, x: torch.Tensor, at: int, ratio: float) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                if index == at:
                    x = ratio * x + (1 - ratio) * x.flip(0)
                x = layer(x) if index == 2 else layer(x).tanh()
            return x

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        ratio = random.betavariate(0.4, 0.4)
        out = model(x, random.randrange(3), ratio)
        loss = ratio * mse(out, y) + (1 - ratio) * mse(out, y.flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_hessian_vector_products_between_steps(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step % 3 == 2:
            params = list(net.parameters())
            slopes = torch.autograd.grad(mse(net(x), y), params, create_graph=True)
            vectors = [torch.ones_like(p) for p in params]
            run.log(torch.autograd.grad(slopes, params, vectors))


@adversarial()
def test_hutchinson_trace_steers_the_rate(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        slopes = torch.autograd.grad(mse(net(x), y), list(net.parameters()), create_graph=True)
        signs = [torch.randint(0, 2, p.shape) * 2.0 - 1.0 for p in net.parameters()]
        products = torch.autograd.grad(slopes, list(net.parameters()), signs)
        trace = sum((s * h).sum() for s, h in zip(signs, products, strict=True))
        dist.all_reduce(trace)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + trace.abs().item() / 100)


@adversarial(fallback="")
def test_graph_of_the_step_before_is_used_once_more(run: Script) -> None:
    """The loss of the step before stays alive and is looked at, not run backward."""
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    previous: list[torch.Tensor] = []
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward(retain_graph=True)
        optimizer.step()
        previous.append(loss)
        run.log(previous[-2:] and sum(p.detach() for p in previous))


@adversarial(fallback=ALIASED)
def test_second_backward_on_an_old_graph_is_the_error_of_autograd(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(10)):
        old = mse(net(x), y) if step % 4 == 3 else None
        train_step(model, optimizer, x, y)
        if old is not None:
            try:
                torch.autograd.grad(old, list(net.parameters()))
            except RuntimeError as error:
                run.log("modified by an inplace operation" in str(error))
            del old


@adversarial(three=True)
def test_multi_task_with_a_task_missing_in_some_batches(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = mlp(outputs=8)
            self.heads = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

        def forward(self, x: torch.Tensor, tasks: list[str]) -> dict[str, torch.Tensor]:
            h = self.trunk(x)
            return {t: self.heads[t](h) for t in tasks}

    model = run.ddp(Net(), find_unused_parameters=True)
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches()):
        tasks = (["a"], ["b"], ["a", "b"])[(step + run.rank) % 3]
        optimizer.zero_grad()
        loss = sum(mse(out, y) for out in model(x, tasks).values())
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_triplet_loss_over_three_forwards_with_hard_negatives(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, _ in run.batches():
        with torch.no_grad():
            distance = torch.cdist(model.module(x), model.module(x)).fill_diagonal_(99.0)
        hard = x[distance.argmin(1)]
        optimizer.zero_grad()
        loss = F.triplet_margin_loss(model(x), model(x + 0.01), model(hard))
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_memory_bank_of_features_in_a_python_deque(run: Script) -> None:
    from collections import deque

    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    bank: deque[torch.Tensor] = deque(maxlen=3)
    for x, y in run.batches():
        z = model(x)
        loss = mse(z, y)
        if bank:
            loss = loss + 0.1 * (z @ torch.cat(list(bank)).T).logsumexp(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bank.append(z.detach())
        run.log(loss)


@adversarial(fallback=GRADIENTS_READ)
def test_meta_weights_of_samples_through_a_virtual_step(run: Script) -> None:
    """Learning to reweight: per-sample weights from a look-ahead on a copy of the weights."""
    from torch.func import functional_call

    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        weights = {n: (p - 0.1 * p.grad).detach().requires_grad_() for n, p in net.named_parameters()}
        eps = torch.zeros(len(x), requires_grad=True)
        inner = (eps * (functional_call(net, weights, (x,)) - y).pow(2).mean(1)).sum()
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {n: w - 0.1 * s for (n, w), s in zip(weights.items(), slopes, strict=True)}
        (g,) = torch.autograd.grad(mse(functional_call(net, moved, (x[:2],)), y[:2]), eps)
        optimizer.step()
        run.log(g)


@adversarial(fallback=ALIASED)
def test_gradient_of_the_step_is_part_of_a_later_graph(run: Script) -> None:
    """A graph over the parameters stays alive across steps, as of an unfinished inner loop."""
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    alive: list[torch.Tensor] = []
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        alive = [net(x)]
    run.log(alive)


@adversarial()
def test_losses_computed_under_autocast_with_cached_casts(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse(model(x), y) + mse(model(x + 0.1), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            run.log(model.module(x), loss)


@adversarial()
def test_no_grad_as_a_decorator_around_evaluation_and_global_grad_switch(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for x, y in run.batches(10):
        run.log(train_step(model, optimizer, x, y))
        run.log(evaluate(x))
        torch.set_grad_enabled(False)
        try:
            run.log(model(x).requires_grad)
        finally:
            torch.set_grad_enabled(True)
