"""Every optimizer of torch.optim that updates each parameter by itself, and ways to combine them."""

from __future__ import annotations

from torch import nn, optim
from torch.optim import Optimizer

from equivalence import Factory, optimizer

OPTIMIZERS: dict[str, Factory] = {
    "sgd": optimizer(optim.SGD, lr=0.1),
    "sgd_momentum": optimizer(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_foreach": optimizer(optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, foreach=True),
    # Without momentum: torch's fused SGD with it raises when a parameter has no gradient at first.
    "sgd_fused": optimizer(optim.SGD, lr=0.05, weight_decay=0.01, fused=True),
    "adam": optimizer(optim.Adam, lr=0.01, weight_decay=0.01),
    "adam_amsgrad": optimizer(optim.Adam, lr=0.01, amsgrad=True),
    "adamw": optimizer(optim.AdamW, lr=0.01),
    "adamw_foreach": optimizer(optim.AdamW, lr=0.01, foreach=True),
    "adamw_fused": optimizer(optim.AdamW, lr=0.01, fused=True),
    "adamw_loop": optimizer(optim.AdamW, lr=0.01, foreach=False, maximize=True),
    "adamax": optimizer(optim.Adamax, lr=0.01),
    "adadelta": optimizer(optim.Adadelta, lr=0.5),
    "adagrad": optimizer(optim.Adagrad, lr=0.05, lr_decay=0.01),
    "adagrad_fused": optimizer(optim.Adagrad, lr=0.05, fused=True),
    "asgd": optimizer(optim.ASGD, lr=0.05),
    "nadam": optimizer(optim.NAdam, lr=0.01),
    "radam": optimizer(optim.RAdam, lr=0.01),
    "rmsprop": optimizer(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "rprop": optimizer(optim.Rprop, lr=0.01),
    "adafactor": optimizer(optim.Adafactor, lr=0.05),
}
# These need models of their own; see their use.
MUON: Factory = optimizer(optim.Muon, lr=0.02) if hasattr(optim, "Muon") else OPTIMIZERS["sgd"]


def grouped(model: nn.Module) -> Optimizer:
    """Weights and the rest in two param groups that differ in every hyperparameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "lr": 0.02, "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() <= 1], "betas": (0.5, 0.9), "eps": 1e-5},
        ],
        lr=0.01,
        weight_decay=0.0,
    )


def two_optimizers(model: nn.Module) -> list[Optimizer]:
    """Muon for matrices (where there is one) and AdamW for the rest, the way Muon is used."""
    matrices = [p for p in model.parameters() if p.dim() == 2 and p.numel()]
    rest = [p for p in model.parameters() if p.dim() != 2 or not p.numel()]
    first = optim.Muon(matrices, lr=0.02) if hasattr(optim, "Muon") else optim.SGD(matrices, lr=0.1)
    return [first, optim.AdamW(rest, lr=0.01)]


def interleaved_optimizers(model: nn.Module) -> list[Optimizer]:
    """Neighbouring parameters belong to different optimizers, so that fusion groups hold both."""
    parameters = list(model.parameters())
    return [
        optim.SGD(parameters[::2], lr=0.1, momentum=0.9),
        optim.AdamW(parameters[1::2], lr=0.01),
    ]
