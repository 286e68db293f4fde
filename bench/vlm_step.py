"""One optimizer step of 16 questions at Qwen3-VL-8B's shapes, under several plans in one run: seconds, tokens, memory.

Random weights, made images and texts: 1280×1024 pixels, a prefix of 1,285 tokens, 60 + 4 tokens of question and
answer. In by_image order two images have eight questions each; in shuffle order sixteen images have one each, and
nothing can be shared. Batches are made beforehand: this times the step, not the disk.

    python bench/vlm_step.py                    # by_image order
    python bench/vlm_step.py --order shuffle
    python bench/vlm_step.py --size tiny        # tries the script on a CPU, without the compiled plans
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sameday.data.questions.encode import Encoded
from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.data.questions.source import Picture, ReadImage
from sameday.data.times import Times
from sameday.hardware.ranks import Ranks
from sameday.models.families import family_of
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.vqa.cache import Opened
from sameday.tasks.vqa.task import VqaTask
from sameday.train.commit import StepCommit
from sameday.train.steps import Steps

ONE_BY_ONE: dict[str, Any] = {"token_budget": 10**9, "pin_memory": True, "attention": "sdpa"}
FOUR = {**ONE_BY_ONE, "max_questions": 4}
FAST = {"label_only_logits": True, "optimizer_impl": "fused"}
COMPILED = {"compile": "layers", "pad_to_multiple": 128}
SHARED = {
    **FAST,
    "share_images": True,
    "packing": True,
    "max_questions": None,
    "token_budget": 8192,
    "pin_memory": True,
    "attention": "sdpa",
}
PLANS: dict[str, dict[str, Any]] = {
    "plain: 1×16, full checkpointing": {**ONE_BY_ONE, "checkpointing": "full"},
    "1×16, no checkpointing": ONE_BY_ONE,
    "4×4, no checkpointing": FOUR,
    "4×4, label logits, fused AdamW": {**FOUR, **FAST},
    "4×4, label logits, fused AdamW, compiled": {**FOUR, **FAST, **COMPILED},
    "shared, dense mask": SHARED,
    "shared, dense mask, full checkpointing": {**SHARED, "checkpointing": "full"},
    "shared, dense mask, compiled": {**SHARED, **COMPILED},
    "shared, flex, compiled": {**SHARED, **COMPILED, "attention": "flex"},
    "shared, split, compiled": {**SHARED, **COMPILED, "attention": "split", "pad_to_multiple": 32},
    "shared, fused, compiled": {**SHARED, **COMPILED, "attention": "fused", "pad_to_multiple": 32},
    "shared, split, compiled, selective checkpointing": {
        **SHARED,
        **COMPILED,
        "attention": "split",
        "pad_to_multiple": 32,
        "checkpointing": "selective",
    },
    "shared, split, compiled, full checkpointing": {
        **SHARED,
        **COMPILED,
        "attention": "split",
        "pad_to_multiple": 32,
        "checkpointing": "full",
    },
    "shared, flex, compiled, full checkpointing": {
        **SHARED,
        **COMPILED,
        "attention": "flex",
        "checkpointing": "full",
    },
}
SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        "text": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision": {"out_hidden_size": 4096},
    },
    "tiny": {
        "text": {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "vision": {
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
        }
        | {"num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]},
    },
}
IMAGE_TOKEN = 500


class MadeData:
    """Stands where encoder and image processor stand: the same questions and pixels for every plan."""

    family = family_of("qwen3_vl")
    merge_size = 2
    end_token = 0
    end_note = None

    def __init__(self, order: str, size: str, vocabulary: int, grid: tuple[int, int] = (64, 80)) -> None:
        self.grid = grid if size == "8b" else (8, 10)  # patches of an image, of 1024 × 1280 if nothing else is said
        images = 2 if order == "by_image" else 16
        rng = np.random.default_rng(0)
        patches = self.grid[0] * self.grid[1]
        self.image_pixels = torch.from_numpy(rng.integers(0, 256, (images, patches * 16 * 16 * 3), dtype=np.uint8))
        self.encoded: dict[int, Encoded] = {}
        span = (4, 4 + patches // 4)  # three tokens of frame and <vision_start> before, <vision_end> after
        head = rng.integers(1, 400, 4)
        for i in range(16):
            image = i * images // 16
            ref = ImageRef(Path(str(image)), f"image {image}", 1280, 1024)
            tail = rng.integers(1, 400, 64)
            tokens = np.concatenate([head, np.full(patches // 4, IMAGE_TOKEN), [450], tail]).astype(np.int64)
            targets = np.zeros(len(tokens), bool)
            targets[-4:] = True
            message = (Message("user", (0, "")), Message("assistant", ("",)))
            sample = Sample(i, f"made:{i}", (ref,), message)
            self.encoded[i] = Encoded(sample, tokens, targets, span[1] + 1, (self.grid,), (span,))

    def encode(self, sample: Sample) -> Encoded:
        return self.encoded[sample.id]

    def note(self, _torchvision: bool) -> None:
        """Nothing is resized."""

    def read_image(self, image: ImageRef) -> Picture:
        return Picture(image.digest, self.image_pixels[int(image.path.name)], False, Times())

    def once(self) -> ReadImage:
        return self.read_image


def build(size: str, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> Any:
    """With so many decoder layers, or all; the configuration names all."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    shapes = SIZES[size]
    config = Qwen3VLConfig(
        text_config=shapes["text"],
        vision_config=shapes["vision"],
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
    every = config.text_config.num_hidden_layers
    config.text_config.num_hidden_layers = layers or every
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    with device:
        model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(before)
    model.config.text_config.num_hidden_layers = every
    return model.eval()


def measure(
    name: str,
    plan: Plan,
    recipe: VqaRecipe,
    data: MadeData,
    size: str,
    device: torch.device,
    steps: int,
    base: Any = None,
) -> dict[str, Any]:
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    byte_table = np.linspace(-1, 1, 256, dtype=np.float32)[None].repeat(3, 0)
    base = build(size, device, dtype) if base is None else base
    model = VisionLanguageModel(base, data.family, recipe, plan, device, byte_table)
    del base
    samples = [e.sample for e in data.encoded.values()]
    made: Any = Opened(data, "none", [])  # type: ignore[arg-type]
    task = VqaTask(recipe, plan, model, data, data, {"train": samples}, cache=made)  # type: ignore[arg-type]
    trained = task.trained()
    for i, (_, parameter) in enumerate(sorted(trained.items())):  # away from the start, where B is zero
        generator = torch.Generator().manual_seed(i)
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator).to(device)
    computed = Steps(recipe, plan, task, Ranks())
    gradients, commit = computed.gradients, StepCommit(computed.optimizer, computed.gradients, recipe.max_grad_norm)
    batches = [b.pin_memory() if cuda else b for b in task.batches(0, None, Ranks())]
    task.training(True)
    times, first = [], {}
    for step in range(steps + 2):
        if step == 2 and cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        gradients.zero()
        moved = (batch.to(device, non_blocking=True) for batch in batches)
        computed.accumulate(moved, step)
        if step == 0:
            first = {"gradient": gradients.all.clone().cpu(), "warm-up": time.perf_counter() - began}
        loss, *_rest, _norm = commit.finish(commit.begin(1e-7))
        if step == 0:
            first["loss"] = loss
        if cuda:
            torch.cuda.synchronize()
        if step >= 2:
            times.append(time.perf_counter() - began)
    assert _rest[0] == 0, f"{name}: out of memory"
    return {
        "plan": name,
        "seconds": statistics.median(times),
        "least": min(times),
        "most": max(times),
        "tokens": sum(b.tokens.numel() for b in batches),
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan"),
        "sizes": {name: parameter.numel() for name, parameter in trained.items()},
        **first,
    }


HEADS = "{:44s} {:>8s} {:>15s} {:>8s} {:>7s} {:>6s} {:>8s} {:>7s}".format(
    "plan", "s/step", "(least-most)", "faster", "tokens", "GiB", "loss", "off"
)


def line(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """`off` is the relative distance from the plain plan's gradient at the same weights."""
    off = (row["gradient"] - plain["gradient"]).norm() / plain["gradient"].norm()
    spread = f"({row['least']:.3f}-{row['most']:.3f})"
    return (
        f"{row['plan']:44s} {row['seconds']:8.3f} {spread:>15s} {plain['seconds'] / row['seconds']:7.1f}x"
        f" {row['tokens']:7d} {row['GiB']:6.1f} {row['loss']:8.4f} {off:7.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", choices=("by_image", "shuffle"), default="by_image")
    parser.add_argument("--size", choices=tuple(SIZES), default="8b")
    parser.add_argument("--steps", type=int, default=7, help="timed steps, after two that are not")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--only", help="plans whose name ends with one of these (a;b), besides the plain one")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = VqaRecipe.model_validate(
        {"model": "made", "data": {"train": "made"}, "order": "listed", "lora": {"dropout": args.dropout}}
        | ({} if device.type == "cuda" else {"precision": "float32"})  # few CPUs multiply bf16 at speed
    )
    data = MadeData(args.order, args.size, 512)
    rows: list[dict[str, Any]] = []
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    where += f", torch {torch.__version__}"
    print(f"{args.size}, order {args.order}, 16 questions a step, dropout {args.dropout}, {where}\n{HEADS}", flush=True)
    for name, fields in PLANS.items():
        if args.only and rows and not name.endswith(tuple(args.only.split(";"))):
            continue
        if args.order == "shuffle" and "packing" in fields:
            # Nothing to share: rows of four questions, so that a micro-batch is no larger than the 4×4 ones.
            fields = {**fields, "token_budget": 5500}
        if device.type == "cpu" and "compile" in fields:
            print(f"{name:44s} not on a CPU", flush=True)
            continue
        try:
            row = measure(name, Plan(**fields), recipe, data, args.size, device, args.steps)
        except Exception as error:
            if os.environ.get("SAMEDAY_BENCH_STRICT"):
                raise
            print(f"{name}: failed: {type(error).__name__}: {error}", flush=True)
            continue
        finally:
            gc.collect()
            torch.compiler.reset()
            torch.cuda.empty_cache()
        rows.append(row)
        print(line(row, rows[0]), flush=True)
    if args.json:
        args.json.write_text(json.dumps([{k: v for k, v in r.items() if k != "gradient"} for r in rows], indent=1))


if __name__ == "__main__":
    main()
