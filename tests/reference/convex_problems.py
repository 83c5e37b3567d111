"""Problems with a known solution and known constants, as a model a replica and as plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class LeastSquares:
    """f_i(x) = |A_i x - b_i|^2 / 2, strongly convex in the mean; x has 4 rows so that it counts as a matrix."""

    matrices: np.ndarray
    targets: np.ndarray

    @classmethod
    def random(cls, *, replicas: int = 4, dim: int = 12, rows: int = 9, seed: int = 0) -> LeastSquares:
        generator = np.random.default_rng(seed)
        scale = np.linspace(0.5, 2.0, replicas)[:, None, None]  # replicas differ in smoothness
        matrices = scale * generator.standard_normal((replicas, rows, dim)) / np.sqrt(dim)
        return cls(matrices=matrices, targets=generator.standard_normal((replicas, rows)))

    @property
    def hessians(self) -> np.ndarray:
        return np.einsum("mri,mrj->mij", self.matrices, self.matrices)

    @property
    def smoothness(self) -> list[float]:
        return [float(np.linalg.eigvalsh(h)[-1]) for h in self.hessians]

    @property
    def extremes(self) -> tuple[float, float]:
        """The smallest and largest eigenvalue of the mean's Hessian."""
        values = np.linalg.eigvalsh(self.hessians.mean(0))
        return float(values[0]), float(values[-1])

    def gradient(self, replica: int, x: np.ndarray) -> np.ndarray:
        return self.matrices[replica].T @ (self.matrices[replica] @ x - self.targets[replica])

    def loss(self, x: np.ndarray) -> float:
        return float(0.5 * np.mean(np.sum((np.einsum("mri,i->mr", self.matrices, x) - self.targets) ** 2, axis=1)))

    @property
    def solution(self) -> np.ndarray:
        moment = np.einsum("mri,mr->mi", self.matrices, self.targets).mean(0)
        return np.linalg.solve(self.hessians.mean(0), moment)

    def model(self) -> nn.Module:
        return _Point(self.matrices.shape[2])

    def loss_of(self, model: nn.Module, replica: int) -> torch.Tensor:
        matrix = torch.from_numpy(self.matrices[replica]).float()
        return 0.5 * (matrix @ model.x.reshape(-1) - torch.from_numpy(self.targets[replica]).float()).square().sum()


class _Point(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(4, dim // 4))


@dataclass(frozen=True)
class Saddle:
    """min_x max_y mean_m x'A_m y + a_m'x + b_m'y + strength/2 |x|^2 - strength/2 |y|^2 (arXiv 2110.03313)."""

    matrices: np.ndarray
    linear: np.ndarray
    strength: float

    @classmethod
    def random(cls, *, replicas: int = 4, dim: int = 10, seed: int = 0) -> Saddle:
        generator = np.random.default_rng(seed)
        roots = generator.standard_normal((replicas, dim, dim)) / np.sqrt(dim)
        matrices = np.einsum("mij,mkj->mik", roots, roots) + 0.1 * np.eye(dim)
        linear = generator.standard_normal((replicas, 2 * dim))
        return cls(
            matrices=matrices, linear=linear, strength=float(np.linalg.norm(matrices, 2, axis=(1, 2)).max()) / 10
        )

    @property
    def dim(self) -> int:
        return self.matrices.shape[1]

    @property
    def smoothness(self) -> float:
        return float(np.linalg.norm(self.matrices, 2, axis=(1, 2)).max()) + self.strength

    def operator(self, replica: int, z: np.ndarray) -> np.ndarray:
        x, y, matrix = z[: self.dim], z[self.dim :], self.matrices[replica]
        a, b = self.linear[replica, : self.dim], self.linear[replica, self.dim :]
        return np.concatenate([matrix @ y + a + self.strength * x, -(matrix.T @ x + b - self.strength * y)])

    @property
    def solution(self) -> np.ndarray:
        size = 2 * self.dim
        whole = np.mean([[self.operator(m, e) for e in np.eye(size)] for m in range(len(self.matrices))], axis=0)
        constant = np.mean([self.operator(m, np.zeros(size)) for m in range(len(self.matrices))], axis=0)
        return np.linalg.solve((whole - constant).T, -constant)

    def model(self) -> nn.Module:
        return _Players(self.dim)

    def loss_of(self, model: nn.Module, replica: int) -> torch.Tensor:
        x, y = model.low.point, model.high.point
        matrix = torch.from_numpy(self.matrices[replica]).float()
        linear = torch.from_numpy(self.linear[replica]).float()
        quadratic = 0.5 * self.strength * (x.square().sum() - y.square().sum())
        return x @ matrix @ y + linear[: self.dim] @ x + linear[self.dim :] @ y + quadratic


class _Player(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.zeros(dim))


class _Players(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.low, self.high = _Player(dim), _Player(dim)


def top(x: np.ndarray, count: int) -> np.ndarray:
    """Keep the largest magnitudes; of equal ones those that come first."""
    kept = np.zeros_like(x)
    chosen = np.argsort(-np.abs(x), kind="stable")[:count]
    kept[chosen] = x[chosen]
    return kept
