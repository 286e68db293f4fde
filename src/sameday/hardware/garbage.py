"""Python's garbage while a GPU trains. Libraries and a model are half a million objects: a collection among all of them
takes half a second, in the middle of some step. So garbage is collected before, what is left is frozen, and a step's
own objects are collected as ever. On a CPU, whose steps are longer, collections stay as they are."""

from __future__ import annotations

import gc

import torch

DEVICES = ("cuda",)
"""On which it is done."""


def collect(device: torch.device) -> None:
    """All of it, so that none is frozen: the model of an earlier training in this process would stay in memory."""
    unfreeze(device)
    if device.type in DEVICES:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def freeze(device: torch.device) -> None:
    if device.type in DEVICES:
        gc.freeze()


def unfreeze(device: torch.device) -> None:
    if device.type in DEVICES:
        gc.unfreeze()
