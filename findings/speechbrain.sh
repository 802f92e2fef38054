#!/usr/bin/env bash
# speechbrain 1.1.2 with torch 2.15.0, CPU, one process: gradient clipping in Brain.fit (max_grad_norm).
#
# Behaviour: only the gradients of an optimizer's first param group are clipped; those of further groups (no weight decay for
# biases, another learning rate for a pretrained encoder) are used as they are, and nothing says so.
#
# Seen, with max_grad_norm=0.001:
#   norms of gradients at the step: first group 0.001, second group 0.019
#
# Exits with 0 if it is so, with 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet torch==2.15.0 speechbrain==1.1.2
cat > "$folder/norms.py" <<'EOF'
import speechbrain as sb
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Recipe(sb.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch["x"])

    def compute_objectives(self, outputs, batch, stage):
        return outputs.square().mean()


def groups_of(_):
    return torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias]}], lr=0.1)


def note(optimizer, *_):
    for group in optimizer.param_groups:
        norms.append(torch.cat([p.grad.flatten() for p in group["params"]]).norm().item())


norms = []
torch.manual_seed(0)
net = nn.Linear(4, 2)
brain = Recipe({"net": net}, groups_of, run_opts={"device": "cpu", "max_grad_norm": 0.001, "noprogressbar": True})
register_optimizer_step_pre_hook(note)
brain.fit(range(1), [{"x": torch.randn(8, 4)}])
first, second = norms
print(f"norms of gradients at the step: first group {first:.2g}, second group {second:.2g}")
assert first < 0.00101 < second, "changed"
EOF
"$python" "$folder/norms.py" 2> "$folder/err" || { cat "$folder/err"; exit 1; }
