"""A small GPT, trained as nanoGPT trains one: gradient accumulation, clipping, a cosine learning rate.

    torchrun --nproc-per-node 2 docs/recipes/nanogpt_like.py --dear

`--dear` adds one line. The data are random tokens from a seed, and the model is tiny, so that it runs anywhere.
Clipping costs the overlap of updates; `dx.attach(..., norms="sharded")` keeps it, with norms that may differ in their
last bits.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx

VOCABULARY, BLOCK, WIDTH, HEADS, LAYERS, BATCH = 64, 16, 32, 2, 2, 4


class Block(nn.Module):
    """Causal attention and an MLP, both behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)]
        attended = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(attended)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that shares its weight with the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--max-iters", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per optimizer step")
    parser.add_argument("--grad-clip", type=float, default=1.0, help="0: no clipping")
    args = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1337)
    model = GPT().to(device)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(enabled=False)
    model = DistributedDataParallel(model)
    if args.dear:
        state = dx.attach(model, optimizer, fusion_mb=0.02)  # without fusion_mb the size is searched for

    generator = torch.Generator().manual_seed(rank)
    for iteration in range(args.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * (1e-3 - 1e-4) * (1 + math.cos(math.pi * iteration / args.max_iters))
        for micro_step in range(args.accumulate):
            # As nanoGPT does it, instead of `with model.no_sync()`.
            model.require_backward_grad_sync = micro_step == args.accumulate - 1
            sequence = torch.randint(VOCABULARY, (BATCH, BLOCK + 1), generator=generator).to(device)
            _, loss = model(sequence[:, :-1], sequence[:, 1:])
            scaler.scale(loss / args.accumulate).backward()
        if args.grad_clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    if rank == 0:
        print(f"loss {loss.item():.4f}")
        if args.dear:
            print(state.stats())
    if args.out:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
