"""The scripts and manifests of docs/cluster.md: they are valid, and what they start trains as plain DDP.

There is no cluster: commands of Slurm are stand-ins that start what they are given on this machine, and nodes of
Kubernetes are two torchruns with the variables that its Trainer sets.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import launched
from equivalence import assert_same

DOCS = launched.ROOT / "docs"
RANKS = 2
LAUNCH_TIMEOUT_S = 240

pytestmark = [pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S), pytest.mark.xdist_group("recipes")]

# Takes the place of the user's train.py: a recipe, whose results go beside it.
TRAIN = f"""
import runpy, sys
from pathlib import Path
Path(f"arguments-{{__import__('os').environ['RANK']}}").write_text(" ".join(sys.argv[1:]))
script = {str(DOCS / "recipes" / "fabric.py")!r}
sys.argv = [script, "--out", "."]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A folder with a train.py for each of "plain" and "attached"."""
    pytest.importorskip("lightning")
    made = {name: tmp_path / name for name in ("plain", "attached")}
    for folder in made.values():
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
    return made


def _variables(name: str, more: Mapping[str, str]) -> dict[str, str]:
    path = {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    package = {"PYTHONPATH": str(launched.ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    switch = {"DDP_CROSSOVER": "off"} if name == "plain" else {}
    return {**os.environ, **path, **package, **switch, **more}


def _assert_same_results(folders: Mapping[str, Path]) -> None:
    for rank in range(RANKS):
        ours, plain = (torch.load(folders[name] / f"{rank}.pt", weights_only=True) for name in ("attached", "plain"))
        assert_same(ours, plain, f"rank {rank}")


# Slurm


def _stand_ins(folder: Path) -> str:
    """Return a PATH with a `scontrol` that knows one node, and a `srun` that starts its command here."""
    for name, text in (
        ("scontrol", "echo localhost"),
        ("srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"'),
    ):
        command = folder / name
        command.write_text(f"#!/bin/bash\n{text}\n")
        command.chmod(0o755)
    return os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))


@pytest.mark.nightly
def test_a_run_of_the_slurm_array_trains_as_plain_ddp(folders: Mapping[str, Path], tmp_path: Path) -> None:
    slurm = {
        "PATH": _stand_ins(tmp_path),
        "NIC": "lo",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_GPUS_ON_NODE": str(RANKS),
        "SLURM_JOB_NODELIST": "node[1-1]",
        "SLURM_JOB_NUM_NODES": "1",
    }
    outputs = {}
    for name, folder in folders.items():
        # The job's number makes the port.
        variables = _variables(name, slurm | {"SLURM_JOB_ID": str(_free_port(20000, 40000) - 20000)})
        command = ["bash", str(DOCS / "array.sbatch")]
        outputs[name] = _finish(_start(command, folder, variables))
        assert (folder / "arguments-0").read_text() == "--lr 1e-3 --output-dir runs/lr-1e-3"
    assert "attached to" in outputs["attached"] and "attached to" not in outputs["plain"], outputs
    _assert_same_results(folders)


# Kubernetes


def _train_job() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    manifest: dict[str, Any] = yaml.safe_load((DOCS / "train-job.yaml").read_text())
    return manifest


def test_the_kubernetes_manifest_has_fields_of_a_train_job_only() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = _train_job()
    understood = models.TrainerV1alpha1TrainJob.from_dict(manifest)  # checks types, and drops what it does not know
    assert understood.to_dict() == manifest


@pytest.mark.nightly
def test_the_nodes_of_the_kubernetes_manifest_train_as_plain_ddp(folders: Mapping[str, Path]) -> None:
    trainer = _train_job()["spec"]["trainer"]
    variables = {each["name"]: each["value"] for each in trainer["env"]}
    assert variables == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    for name, folder in folders.items():
        port = str(_free_port(20000, 40000))
        jobs = []
        for node in range(trainer["numNodes"]):  # each with one process, where a real one has numProcPerNode
            of_trainer = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1"}
            of_trainer |= {"PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}
            here = _variables(name, of_trainer | dict.fromkeys(variables, "lo"))
            jobs.append(_start([*trainer["command"], *trainer["args"]], folder, here))
        outputs = [_finish(job) for job in jobs]
        assert any("attached to" in output for output in outputs) == (name == "attached"), outputs
        assert (folder / "arguments-1").read_text() == "--epochs 90"
    _assert_same_results(folders)


def _free_port(lowest: int, highest: int) -> int:
    for port in range(lowest + os.getpid() % 10000, highest):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def _start(command: list[str], folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=dict(variables), text=True, **streams)  # type: ignore[call-overload]


def _finish(job: subprocess.Popen[str]) -> str:
    output = launched.finish(job, LAUNCH_TIMEOUT_S)
    assert job.returncode == 0, output
    return output
