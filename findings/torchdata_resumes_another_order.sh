#!/usr/bin/env bash
# torchdata 0.11.0 with torch 2.15.0: a StatefulDataLoader that is resumed in the middle of an epoch goes on with samples
# that the epoch has had.
#
# Its documentation says that torch's RandomSampler is patched by the import, so that nobody needs a sampler of their own
# to resume. 0.8 has ended that. The sampler draws an order anew when the state is loaded, and the loader skips as many of
# its samples as had been used. With a generator that is seeded as the first time this is the order of the first epoch: a
# run that is resumed there is right, and one that is resumed later is not. Nothing warns.
#
# `shuffle=True` with a generator goes wrong one epoch later: the resumed epoch is right, and the next has another order
# than in the run that was not stopped. With worker processes, or without a generator, it is right.
#
# Seen with 1000 samples, resumed behind 500 of the second epoch: "RandomSampler: 259 samples of the epoch twice, 259 never;
# shuffle: 0 twice, next epoch other; shuffle with 2 workers: 0 twice, next epoch the same".
# Exits 0 while it is so, 1 once they behave otherwise.
# PYTHON (default: python3) must have torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
"$py" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" torchdata==0.11.0
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$py" - <<'PY'
from importlib.metadata import version

import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES = list(range(1000))


def with_sampler(generator):
    return StatefulDataLoader(SAMPLES, 10, sampler=RandomSampler(SAMPLES, generator=generator))


def with_shuffle(generator, workers=0):
    return StatefulDataLoader(SAMPLES, 10, shuffle=True, generator=generator, num_workers=workers)


def with_workers(generator):
    return with_shuffle(generator, 2)


def epoch(loader):
    return torch.cat(list(loader)).tolist()


def resumed(make):
    """How many samples of the second epoch come twice if it is resumed in its middle, and whether the third is the same."""
    loader = make(torch.Generator().manual_seed(0))
    epoch(loader)
    seen = []
    for index, batch in enumerate(loader, 1):
        seen += batch.tolist()
        if index == 50:
            had, state = list(seen), loader.state_dict()
    third = epoch(loader)

    loader = make(torch.Generator().manual_seed(0))
    loader.load_state_dict(state)
    rest = epoch(loader)
    assert len(had + rest) == len(SAMPLES)
    return len(had + rest) - len({*had, *rest}), epoch(loader) == third


(twice, _), shuffled, workers = (resumed(make) for make in (with_sampler, with_shuffle, with_workers))
print(
    f"torch {torch.__version__}, torchdata {version('torchdata')}: RandomSampler: {twice} samples of the epoch twice, {twice} "
    "never; "
    + "; ".join(
        f"{name}: {again} twice, next epoch {'the same' if same else 'other'}"
        for name, (again, same) in {"shuffle": shuffled, "shuffle with 2 workers": workers}.items()
    )
)
raise SystemExit(not (twice > 100 and shuffled == (0, False) and workers == (0, True)))
PY
