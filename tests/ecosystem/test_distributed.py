"""Two processes on the CPU: DDP and FSDP2 around, and inside, torch.compile; DTensor and other subclasses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import flash_inductor
from flash_inductor.report import collect

from .model import causal, make_qkv

TESTS = Path(__file__).parents[1]
SECONDS = 300


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found.  They meet in a file, not at a port that somebody else may have."""
    path = tmp_path_factory.mktemp("ranks")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(path / "inductor"),  # shared: they compile the same
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "ecosystem.ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(path / "meet"), str(path / f"{rank}.pt")],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return [torch.load(path / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_step_of_two_processes_is_that_of_one(found: list[dict[str, Any]], wrapper: str) -> None:
    for rank in found:
        assert rank[wrapper]["replaced"] == [True]
        assert rank[wrapper]["out"] < 1e-5
        assert rank[wrapper]["grads"] < 1e-4


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
def test_a_dtensor_of_one_rank_is_its_local_tensor(mesh: Any, placement: Any) -> None:
    """Of more ranks: tests/distributed."""
    inputs = [x.detach() for x in make_qkv()]
    out = flash_inductor.attention(*(distribute_tensor(x, mesh, [placement]) for x in inputs), is_causal=True)
    torch.testing.assert_close(out.full_tensor(), causal(*inputs))  # type: ignore[attr-defined]


def test_local_tensors_of_a_dtensor_are_ordinary(mesh: Any) -> None:
    """What tensor-parallel layers hand on (use_local_output=True, their default)."""
    inputs = make_qkv()

    def function(*inputs: Tensor) -> Tensor:
        return causal(*(x.to_local() for x in inputs))  # type: ignore[attr-defined]

    sharded = [distribute_tensor(x.detach(), mesh, [Shard(1)]) for x in inputs]
    with flash_inductor.enabled(), collect() as sites:
        out = torch.compile(function)(*sharded)
    torch.testing.assert_close(out, causal(*inputs).detach())
    assert [s.replaced for s in sites] == [True]


def test_a_subclass_of_two_tensors_is_left_alone_and_right() -> None:
    inputs = [x.detach() for x in make_qkv()]
    pairs = [TwoTensor(x, 2 * x) for x in inputs]
    with flash_inductor.enabled(), collect() as sites:
        out = torch.compile(causal)(*pairs)
    assert [s.replaced for s in sites] == [False]
    assert "TwoTensor, not a plain tensor" in (sites[0].reason or "")
    torch.testing.assert_close(out.a, causal(*inputs))
    torch.testing.assert_close(out.b, causal(*(2 * x for x in inputs)))


def test_the_op_takes_a_subclass_apart() -> None:
    inputs = [x.detach() for x in make_qkv()]
    out = flash_inductor.attention(*(TwoTensor(x, 2 * x) for x in inputs), is_causal=True)
    torch.testing.assert_close(out.a, causal(*inputs))
    torch.testing.assert_close(out.b, causal(*(2 * x for x in inputs)))
