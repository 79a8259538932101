"""What training does at which time. Progress runs from 0 to 1, by the clock or by steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

_WARMUP, _DECAY_START, _FINAL_FACTOR = 0.01, 0.4, 0.02


@dataclass(frozen=True)
class Phases:
    """Progress at which each part of the recipe starts."""

    drafts: float = 0.05
    alignment: float = 0.05
    sparse: float = 0.5
    freeze_router_bias: float = 0.9


def learning_rate_factor(progress: float) -> float:
    """Linear warm-up, flat, cosine down to a small rest."""
    if progress < _WARMUP:
        return max(progress, 1e-4) / _WARMUP
    if progress < _DECAY_START:
        return 1.0
    done = min((progress - _DECAY_START) / (1.0 - _DECAY_START), 1.0)
    return _FINAL_FACTOR + (1.0 - _FINAL_FACTOR) * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Hyperparameters:
    learning_rate: float = 3e-3
    indexer_learning_rate: float = 4e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    router_bias_step: float = 1e-3
    dropout: float = 0.05


class Optimizer:
    """AdamW with three groups (matrices, indexers, the rest) and one clip per gradient source.

    The indexers learn from their own loss; clipping them apart keeps either side from shrinking
    the other's steps.
    """

    def __init__(self, model: nn.Module, hyper: Hyperparameters) -> None:
        self.hyper = hyper
        matrices, indexers, others = [], [], []
        for name, parameter in model.named_parameters():
            if ".indexer." in name:
                indexers.append(parameter)
            elif parameter.dim() >= 2 and "embed" not in name:
                matrices.append(parameter)
            else:
                others.append(parameter)
        self.clip_groups = (matrices + others, indexers)
        rate, index_rate = hyper.learning_rate, hyper.indexer_learning_rate
        groups = [
            {"params": matrices, "base": rate, "weight_decay": hyper.weight_decay},
            {"params": indexers, "base": index_rate, "weight_decay": 0.0},
            {"params": others, "base": rate, "weight_decay": 0.0},
        ]
        fused = matrices[0].is_cuda
        self.adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-10, fused=fused)

    def step(self, progress: float) -> None:
        factor = learning_rate_factor(progress)
        for group in self.adamw.param_groups:
            group["lr"] = group["base"] * factor
        for parameters in self.clip_groups:
            with_gradient = [p for p in parameters if p.grad is not None]
            nn.utils.clip_grad_norm_(with_gradient, self.hyper.clip_norm, foreach=True)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
