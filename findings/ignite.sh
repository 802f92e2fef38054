#!/usr/bin/env bash
# pytorch-ignite 0.5.5 with torch 2.15.0, CPU, gloo: the order of samples from idist.auto_dataloader.
#
# Behaviour: on two ranks (1) with shuffle=True all epochs have the order of the first, because nobody calls the sampler's
# set_epoch(); (2) without `shuffle`, as for validation, samples are shuffled, too. In one process, the same lines give a new
# order in each epoch, and the order of the data set.
#
# Seen:
#   1 rank, {'shuffle': True}: [2, 0, 5, 3, 1, 4, 7, 6] [0, 3, 7, 1, 6, 2, 5, 4]
#   1 rank, {}: [0, 1, 2, 3, 4, 5, 6, 7] [0, 1, 2, 3, 4, 5, 6, 7]
#   2 ranks, {'shuffle': True}: [4, 7, 2, 1] [4, 7, 2, 1]
#   2 ranks, {}: [4, 7, 2, 1] [4, 7, 2, 1]
#
# Exits with 0 if it is so, with 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet torch==2.15.0 pytorch-ignite==0.5.5 numpy
cat > "$folder/orders.py" <<'EOF'
import os

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.utils import manual_seed
from torch.utils.data import TensorDataset


def main(_):
    manual_seed(0)
    for options in ({"shuffle": True}, {}):
        loader = idist.auto_dataloader(TensorDataset(torch.arange(8)), batch_size=2, **options)
        epochs = []
        trainer = Engine(lambda _, batch: epochs[-1].extend(batch[0].tolist()))
        trainer.add_event_handler(Events.EPOCH_STARTED, lambda: epochs.append([]))
        trainer.run(loader, max_epochs=2)
        if idist.get_rank() == 0:
            ranks = idist.get_world_size()
            print(f"{ranks} rank{'s' * (ranks > 1)}, {options}:", *epochs)
            is_repeated, is_in_order = epochs[0] == epochs[1], epochs[0] == sorted(epochs[0])
            assert is_repeated == (ranks == 2 or not options), "changed: the orders of epochs"
            assert is_in_order == (ranks == 1 and not options), "changed: what is shuffled"


with idist.Parallel(backend="gloo" if "RANK" in os.environ else None) as parallel:
    parallel.run(main)
EOF
"$python" "$folder/orders.py" 2> "$folder/err" || { cat "$folder/err"; exit 1; }
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/orders.py" 2> "$folder/err" || { cat "$folder/err"; exit 1; }
