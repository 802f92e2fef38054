"""Settings and uses of DDP itself: the second half."""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from adversary.nets import mlp, mse, train_step
from adversary.script import GRADIENTS_READ, Script, adversarial


@adversarial(three=True, fallback=GRADIENTS_READ)
def test_no_sync_around_the_whole_window_with_manual_all_reduce(run: Script) -> None:
    """Every third step averages local gradients by hand; the others go through DDP."""
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches(15)):
        optimizer.zero_grad()
        if step % 3 == 2:
            with model.no_sync():
                mse(model(x), y).backward()
            for p in model.parameters():
                gathered = [torch.empty_like(p.grad) for _ in range(run.world_size)]
                dist.all_gather(gathered, p.grad)
                p.grad = torch.stack(gathered).mean(0)
        else:
            mse(model(x), y).backward()
        optimizer.step()


@adversarial()
def test_large_buckets_and_static_graph_with_accumulation(run: Script) -> None:
    model = run.ddp(mlp(), static_graph=True, bucket_cap_mb=100)
    optimizer = Adam(model.parameters(), lr=0.02)
    run.attach(model, optimizer)
    for index, (x, y) in enumerate(run.batches(20)):
        if index % 2 or index < 3:
            mse(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                mse(model(x), y).backward()


@adversarial()
def test_two_lines_of_the_readme_instead_of_attach(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Adam(model.parameters(), lr=0.02)
    if run.with_dear:
        import ddp_crossover as dx

        state = dx.DearState(model, optimizer, fusion_mb=1e-4)
        model.register_comm_hook(state, dx.dear_hook)
        run.states.append(state)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback="")
def test_default_settings_of_attach_with_a_deep_narrow_model(run: Script) -> None:
    model = run.ddp(nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))))
    optimizer = SGD(model.parameters(), lr=0.02)
    run.attach(model, optimizer, fusion_mb=None, schedule="auto")
    for x, y in run.batches(50, outputs=8):
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback="", deferred=0)
def test_schedule_that_is_plain_all_reduce(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Adam(model.parameters(), lr=0.02)
    run.attach(model, optimizer, schedule="allreduce", fusion_mb=None)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback="")
def test_attach_again_after_detach(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Adam(model.parameters(), lr=0.02)
    run.attach(model, optimizer)
    for round_ in range(3):
        for x, y in run.batches(8):
            run.log(train_step(model, optimizer, x, y))
        if run.with_dear and round_ < 2:
            import ddp_crossover as dx

            run.states.pop().detach()
            run.states.append(dx.attach(model, optimizer, fusion_mb=1e-4))


@adversarial()
def test_buffers_are_changed_by_hand_and_broadcast_by_ddp(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = mlp()
            self.register_buffer("scale", torch.ones(4))
            self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.trunk(x) * self.scale

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        model.module.scale.mul_(1 + 0.1 * run.rank)
        model.module.scale = model.module.scale.clone()
        run.log(model.module.count, model.module.scale)


@adversarial()
def test_ddp_of_a_submodule_only(run: Script) -> None:
    trunk, head = run.ddp(mlp(outputs=8)), nn.Linear(8, 4)
    for p in head.parameters():
        dist.broadcast(p.data, 0)
    optimizer = Adam([*trunk.parameters(), *head.parameters()], lr=0.02)
    run.attach(trunk, optimizer)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(head(trunk(x)), y)
        loss.backward()
        for p in head.parameters():
            dist.all_reduce(p.grad)
            p.grad /= run.world_size
        optimizer.step()
        run.log(loss)


@adversarial()
def test_wrapper_around_the_ddp_delegates_attributes(run: Script) -> None:
    """A custom wrapper calls ddp.forward and delegates attributes, as lightning-like frameworks do."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner.module, name)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return mse(self.inner(batch[0]), batch[1])

    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    wrapper = Wrapper(model)
    for batch in run.batches():
        optimizer.zero_grad()
        loss = wrapper.training_step(batch)
        loss.backward()
        optimizer.step()
        run.log(loss, sum(p.sum() for p in wrapper.parameters()), len(wrapper.append.__name__))


@adversarial(refused="pickle|detach|deepcopy")
def test_refused_pickle_of_the_ddp(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
    pickle.dumps(model)


@adversarial(refused="join")
def test_refused_join_of_uneven_inputs(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    with model.join():
        for x, y in run.batches(5 + run.rank):
            train_step(model, optimizer, x, y)


@adversarial(refused="script|Script")
def test_refused_torchscript_module(run: Script) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = run.train(torch.jit.script(mlp()), Adam, lr=0.02)
    for x, y in run.batches(3):
        train_step(model, optimizer, x, y)


@adversarial(fallback="", strict=False)
def test_optimizer_in_backward_drifts_as_under_plain_ddp(run: Script) -> None:
    net = mlp()
    optimizers = {p: SGD([p], lr=0.1) for p in net.parameters()}
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    model = run.ddp(net, gradient_as_bucket_view=False)
    run.attach(model, *optimizers.values())
    for x, y in run.batches(3):
        mse(model(x), y).backward()


@adversarial(fallback="")
def test_prefixes_of_ddp_are_cut_from_its_state_dict(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 3 == 2:
            weights = {k.removeprefix("module."): v for k, v in model.state_dict().items()}
            other = mlp()
            other.load_state_dict(weights)
            run.log(other(x), isinstance(model, DistributedDataParallel))
