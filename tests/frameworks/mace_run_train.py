"""mace: `mace_run_train` on made-up molecules: forces by double backward, an average of weights, checkpoints."""

import os
import sys
from pathlib import Path

import cpu_ddp
import digests
import numpy as np
import torch
from ase import Atoms
from ase.io import write
from mace.cli.run_train import run
from mace.tools import build_default_arg_parser


def write_molecules(path: Path) -> None:
    generator = np.random.default_rng(7)
    molecules = []
    for _ in range(24):
        positions = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]]) + 0.1 * generator.standard_normal((3, 3))
        molecule = Atoms("OH2", positions=positions)
        molecule.info["REF_energy"] = float(generator.standard_normal())
        molecule.arrays["REF_forces"] = generator.standard_normal((3, 3))
        molecules.append(molecule)
    write(path, molecules, format="extxyz")


def main() -> None:
    torch.distributed.init_process_group("gloo")
    folder = Path(f"of_rank{os.environ['RANK']}").absolute()
    folder.mkdir()
    write_molecules(folder / "water.xyz")
    kept = cpu_ddp.Kept()
    arguments = ["--name", "water", "--train_file", str(folder / "water.xyz"), "--valid_fraction", "0.2", "--seed", "5"]
    arguments += ["--E0s", "{1: 0.0, 8: 0.0}", "--hidden_irreps", "8x0e + 8x1o", "--r_max", "3.0", "--max_ell", "1"]
    arguments += ["--num_interactions", "2", "--correlation", "1", "--batch_size", "4", "--max_num_epochs", "6"]
    arguments += ["--device", "cpu", "--distributed", "--launcher", "torchrun", "--default_dtype", "float32"]
    arguments += ["--ema", "--ema_decay", "0.9", "--MLP_irreps", "8x0e", "--radial_MLP", "[8]", "--work_dir", "work"]
    run(build_default_arg_parser().parse_args([*arguments, *sys.argv[1:]]))
    saved = sorted(Path("work/checkpoints").glob("*.pt"))
    digests.say(kept.model, kept.optimizers, *saved)


if __name__ == "__main__":
    main()
