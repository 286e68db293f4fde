"""Base weights in four bits beside bf16, in one run: a step's time and peak memory at Qwen3-VL-8B's shapes.

    python bench/nf4.py                      one GPU with bitsandbytes; about four minutes
    python bench/nf4.py --size tiny          the same lines on any machine

Weights are random; the questions are those of bench/vlm_step.py, 16 a step about 2 images of 1280×1024. Four-bit models
are made layer by layer, so that no more than one decoder layer is ever there in bf16; `made` is the most memory that
this took, `GiB` the most that a step takes."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from vlm_step import SHARED, MadeData, build, measure

from sameday.models.formats import quantize
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe

SPLIT = {**SHARED, "attention": "split", "pad_to_multiple": 32}
PLANS: dict[str, dict[str, Any]] = {
    "least memory: one at a time, full checkpointing": {
        **SHARED,
        "share_images": False,
        "packing": False,
        "max_questions": 1,
        "checkpointing": "full",
    },
    "shared, full checkpointing, 2048 tokens": {**SPLIT, "token_budget": 2048, "checkpointing": "full"},
    "shared": SPLIT,
    "shared, compiled": {**SPLIT, "compile": "layers"},
}
FORMATS: tuple[dict[str, Any], ...] = ({}, {"base_format": "nf4"}, {"base_format": "nf4", "double_quant": True})


HEADS = "{:48s} {:22s} {:>8s} {:>15s} {:>6s} {:>6s} {:>8s}".format(
    "plan", "weights", "s/step", "(least-most)", "GiB", "made", "loss"
)


def recipe_of(device: torch.device, **chosen: Any) -> VqaRecipe:
    made = {"model": "made", "data": {"train": "made"}, "order": "listed", "lora": {}}
    return VqaRecipe.model_validate(made | ({} if device.type == "cuda" else {"precision": "float32"}) | chosen)


def build_by_layers(size: str, recipe: VqaRecipe, device: torch.device) -> Any:
    """As `build` draws it, but one decoder layer at a time, each quantized before the next is made."""
    model = build(size, device, torch.bfloat16, layers=1)
    text = model.model.language_model
    quantize(model, recipe, device)
    before = torch.get_default_dtype()
    for number in range(1, text.config.num_hidden_layers):
        torch.set_default_dtype(torch.bfloat16)
        with device:
            layer = type(text.layers[0])(text.config, number)
        torch.set_default_dtype(before)
        layer.apply(model._init_weights)
        text.layers.append(layer.eval())
        quantize(model, recipe, device)
    return model


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")


def timed(
    name: str,
    fields: dict[str, Any],
    chosen: dict[str, Any],
    data: MadeData,
    size: str,
    device: torch.device,
    steps: int,
) -> dict[str, Any]:
    """A plan's step with base weights in one format, measured and printed."""
    cuda, recipe = device.type == "cuda", recipe_of(device, **chosen)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    dtype = torch.bfloat16 if cuda else torch.float32
    base = build_by_layers(size, recipe, device) if chosen else build(size, device, dtype)
    made = peak(device)
    row = measure(name, Plan(**fields), recipe, data, size, device, steps, base)
    del base
    forget()
    row = {key: value for key, value in row.items() if key not in ("gradient", "sizes")}
    row |= {"weights": recipe.base_words, "made": made}
    spread = f"({row['least']:.3f}-{row['most']:.3f})"
    print(
        f"{name:48s} {row['weights']:22s} {row['seconds']:8.3f} {spread:>15s} {row['GiB']:6.1f} {made:6.1f}"
        f" {row['loss']:8.4f}",
        flush=True,
    )
    return row


def forget() -> None:
    """What the last model left behind."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after two that are not")
    parser.add_argument("--order", choices=("by_image", "shuffle"), default="by_image")
    parser.add_argument("--only", help="plans whose name ends with one of these (a;b)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    data = MadeData(args.order, args.size, 512)
    where = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{args.size}, order {args.order}, 16 questions a step, {where}, torch {torch.__version__}")
    print(HEADS)
    rows = []
    for name, fields in PLANS.items():
        if args.only and not name.endswith(tuple(args.only.split(";"))):
            continue
        if not cuda and "compile" in fields:
            print(f"{name:48s} not on a CPU")
            continue
        for chosen in FORMATS:
            rows.append(timed(name, fields, chosen, data, args.size, device, args.steps))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
