"""Steps of matrices have even singular values, and stacked matrices are treated one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kestrel.train.loop import OrthogonalSteps, orthogonalised


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 40, 12), (2, 12, 40)])
def test_singular_values_are_about_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(matrices).float())
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_the_step_goes_against_the_gradient_at_the_size_of_an_adam_step() -> None:
    parameter = nn.Parameter(torch.zeros(32, 32))
    parameter.grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    OrthogonalSteps({parameter: 1}).step(lr=0.01, weight_decay=0.0)
    assert (parameter * parameter.grad).sum() < 0
    assert parameter.square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.3)


def test_stacked_matrices_step_as_if_they_were_apart() -> None:
    gradient = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    gradient[8:16] *= 100.0
    stacked = nn.Parameter(torch.ones(24, 8))
    stacked.grad = gradient
    apart = [nn.Parameter(torch.ones(8, 8)) for _ in range(3)]
    for index, each in enumerate(apart):
        each.grad = gradient[8 * index : 8 * index + 8]
    OrthogonalSteps({stacked: 3}).step(0.1, 0.5)
    OrthogonalSteps(dict.fromkeys(apart, 1)).step(0.1, 0.5)
    torch.testing.assert_close(stacked.detach(), torch.cat([each.detach() for each in apart]))


FALSE_TRITON = """
import importlib.machinery, sys
class Finder:  # as on a path with the checkout and without the package
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [{folder!r}]) if name == "triton" else None
sys.meta_path.insert(0, Finder())
import torch
from kestrel.train.loop import adamw
weight = torch.nn.Parameter(torch.ones(2))
adamw([weight], lr=0.1)
print("made")
"""


@pytest.mark.exhaustive
def test_a_folder_named_triton_is_not_taken_for_the_package(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    program = FALSE_TRITON.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "made\n", done.stderr[-2000:]
