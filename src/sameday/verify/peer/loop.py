"""Some steps of training as people write them around transformers and PEFT: their processor, their chat template, their
forward with labels, one question at a time, PEFT's adapters, torch's AdamW, their schedule. Nothing is imported from
the rest of this package: what it does wrong is not done wrong here too.

A job is plain data: the base model, the adapters' form and starting values, the questions of each step, and settings
by the names of a recipe."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.image_utils import load_image
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

Job = dict[str, Any]
Inputs = dict[str, Tensor]

IGNORED = -100
SAMPLED = 512
"""Numbers of a question's pixel values that are kept, evenly spread; of all there is a digest."""
FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


class CannotFollow(ValueError):
    """A plain loop would do something else on purpose, so that nothing can be compared."""


def run(job: Job) -> None:
    """Each step's gradient at the starting weights, then training; all of it written below `job["out"]`."""
    out = Path(job["out"]) / "part-1"
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    processor = load_processor(job)
    if job["max_length"] is not None:
        refuse_lost_answers(processor, job)
    model = load_model(job)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    save(out / "start.safetensors", trained)

    losses = []
    for number, questions in enumerate(job["steps"], start=1):
        loss, _ = gradient(model, processor, questions, job)
        losses.append(loss)
        save(out / f"fixed-{number:06d}.safetensors", {name: p.grad for name, p in trained.items()})
        model.zero_grad()
    (out / "fixed.json").write_text(json.dumps(losses))
    if job["trajectory"]:
        train(model, trained, processor, job, out)


def train(model: Any, trained: dict[str, Any], processor: Any, job: Job, out: Path) -> None:
    optimizer = torch.optim.AdamW(parameter_groups(trained, job), betas=tuple(job["betas"]), eps=job["eps"])
    total = len(job["steps"])
    scheduler = transformers.get_scheduler(SCHEDULES[job["schedule"]], optimizer, job["warmup_steps"], total)
    for number, questions in enumerate(job["steps"], start=1):
        loss, samples = gradient(model, processor, questions, job)
        limit = job["max_grad_norm"]
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), float("inf") if limit is None else limit)
        groups = [
            {key: group[key] for key in ("lr", "weight_decay", "betas", "eps", "names")}
            for group in optimizer.param_groups
        ]
        record = {
            "step": number,
            "order": [question["name"] for question in questions],
            "samples": samples,
            "groups": groups,
            "largest norm": limit,
        }
        append(out / "steps.jsonl", record)
        append(out / "metrics.jsonl", {"step": number, "loss": loss, "grad_norm": float(norm)})
        save(out / f"gradient-{number:06d}.safetensors", {name: p.grad for name, p in trained.items()})
        optimizer.step()
        save(out / f"weights-{number:06d}.safetensors", trained)
        scheduler.step()
        optimizer.zero_grad()


def parameter_groups(trained: dict[str, Any], job: Job) -> list[dict[str, Any]]:
    """By rate and by weight decay, which vectors do not have. Some parts have a rate of their own."""
    groups: dict[tuple[float, float], list[str]] = {}
    for name, parameter in trained.items():
        own = next((rate for part, rate in job["rates"] if part in name), None)
        rate = job["learning_rate"] if own is None else own
        groups.setdefault((rate, job["weight_decay"] if parameter.ndim > 1 else 0.0), []).append(name)
    return [
        {"params": [trained[name] for name in names], "names": names, "lr": rate, "weight_decay": decay}
        for (rate, decay), names in groups.items()
    ]


def gradient(model: Any, processor: Any, questions: Sequence[Any], job: Job) -> tuple[float, list[dict[str, Any]]]:
    """Of a step, one question after another. `sample`: the mean of the questions' losses; `token`: the mean over all
    answer tokens of the step. Also what each question looked like."""
    device = model.device
    prepared = [prepare(processor, question, job) for question in questions]
    answers = [int((inputs["labels"] != IGNORED).sum()) for inputs in prepared]
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:  # zero, not none, also where no question has an image
            parameter.grad = torch.zeros_like(parameter)
    total, samples = 0.0, []
    for question, inputs, count in zip(questions, prepared, answers, strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=job["format"] == "bf16"):
            loss = model(**{name: value.to(device) for name, value in inputs.items()}).loss
        share = 1 / len(questions) if job["loss_weight"] == "sample" else count / sum(answers)
        if loss.requires_grad:  # not of a question without image, where the tower alone is trained
            (loss * share).backward()
        total += loss.item() * share
        samples.append({"id": question["id"], "loss": loss.item(), **seen(inputs, question, model)})
    return total, samples


def prepare(processor: Any, question: Any, job: Job) -> Inputs:
    """The conversation as the processor makes it, with labels at its answers: what the conversation up to an answer has
    more than the prompt before it. Nothing is kept behind the last label, or behind max_length."""
    chat = conversation(question, job)
    inputs = dict(encode(processor, chat))
    tokens = inputs["input_ids"][0]
    labels = torch.full_like(tokens, IGNORED)
    for first, last in answer_places(processor, chat, tokens, job):
        labels[first:last] = tokens[first:last]
    length = int((labels != IGNORED).nonzero().max()) + 1
    length = min(length, job["max_length"] or length)
    inputs |= {name: inputs[name][:, :length] for name in inputs if inputs[name].shape == (1, len(tokens))}
    return {**inputs, "labels": labels[None, :length]}


def answer_places(processor: Any, chat: list[Any], tokens: Tensor, job: Job) -> Iterator[tuple[int, int]]:
    special = torch.tensor(processor.tokenizer.all_special_ids)
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        first = encode(processor, chat[:number], add_generation_prompt=True)["input_ids"].shape[1]
        last = encode(processor, chat[: number + 1])["input_ids"].shape[1]
        if job["answer_end"] == "end_token":  # templates have a line break behind it
            ends = torch.isin(tokens[first:last], special).nonzero()
            last = first + int(ends[0]) + 1 if len(ends) else last
        yield first, last


def refuse_lost_answers(processor: Any, job: Job) -> None:
    lost = {}
    for question in (question for step in job["steps"] for question in step):
        chat = conversation(question, job)
        prompt = encode(processor, chat[:-1], add_generation_prompt=True)["input_ids"].shape[1]
        if prompt >= job["max_length"]:
            lost[question["name"]] = prompt
    if lost:
        name = next(iter(lost))
        raise CannotFollow(
            f"max_length {job['max_length']}: a plain loop would cut the whole answer of {len(lost)} of the questions, "
            f"first of {name}, whose prompt has {lost[name]} tokens, where a recipe cuts the question instead; give a "
            "max_length above the longest prompt"
        )


def conversation(question: Any, job: Job) -> list[dict[str, Any]]:
    """With its images opened, and the system prompt where it has none."""
    images = iter(question["images"])
    chat = [
        {
            "role": message["role"],
            "content": [
                {"type": "image", "image": load_image(next(images))} if part["type"] == "image" else dict(part)
                for part in message["content"]
            ],
        }
        for message in question["messages"]
    ]
    for message in chat:
        if message["role"] == "assistant":  # nothing where the chat template ends an answer by itself
            message["content"][-1]["text"] += job["closing"]
    if job["system_prompt"] is not None and chat[0]["role"] != "system":
        chat.insert(0, {"role": "system", "content": [{"type": "text", "text": job["system_prompt"]}]})
    return chat


def encode(processor: Any, chat: list[Any], add_generation_prompt: bool = False) -> Any:
    return processor.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=add_generation_prompt
    )


# Loading


def load_processor(job: Job) -> Any:
    """As AutoProcessor puts it together, with the image processor that was asked for and nothing for videos: for them
    it would need torchvision."""
    model, revision = job["model"], job["revision"]
    kind = transformers.AutoConfig.from_pretrained(model, revision=revision).model_type
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, revision=revision)
    pixels = {name: job[name] for name in ("min_pixels", "max_pixels") if job[name] is not None}
    images = getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[kind][job["image_backend"]])
    whole = getattr(transformers, PROCESSOR_MAPPING_NAMES[kind])

    class Processor(whole):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    settings, _ = whole.get_processor_dict(model, revision=revision)
    settings = {"chat_template": tokenizer.chat_template} | settings
    parts = dict.fromkeys(whole.get_attributes()) | {
        "image_processor": images.from_pretrained(model, revision=revision, **pixels),
        "tokenizer": tokenizer,
    }
    return Processor(**settings | parts)


def load_model(job: Job) -> Any:
    """Base weights are read in the recipe's format, and computed with in the one that was asked for."""
    base = transformers.AutoModelForImageTextToText.from_pretrained(
        job["model"], revision=job["revision"], dtype=FORMATS[job["stored"]]
    ).to(device=job["device"], dtype=FORMATS[job["format"]])
    config = LoraConfig(
        r=job["r"],
        lora_alpha=job["alpha"],
        lora_dropout=0.0,
        target_modules=job["target_modules"],
        use_rslora=job["rslora"],
        use_dora=job["dora"],
        bias="none",
    )
    model = get_peft_model(base, config)
    set_peft_model_state_dict(model, load_file(Path(job["start"]) / "adapter_model.safetensors"))
    return model.train()


# What is kept


def seen(inputs: Inputs, question: Any, model: Any) -> dict[str, Any]:
    """A question as the model was given it."""
    labels = inputs["labels"][0]
    kept: dict[str, Any] = {
        "tokens": inputs["input_ids"][0].tolist(),
        "labels": [[int(place), int(labels[place])] for place in (labels != IGNORED).nonzero()],
        "images": [Path(image).name for image in question["images"]],
        "modes": [Image.open(image).mode for image in question["images"]],
    }
    if "pixel_values" in inputs:
        cut, kept["grids"] = as_patches(inputs, model.config)
        pixels = cut.to(model.dtype).float().contiguous().numpy()
        kept["pixels"] = hashlib.blake2b(pixels.tobytes(), digest_size=8).hexdigest()
        kept["some pixels"] = pixels.reshape(-1)[:: max(1, pixels.size // SAMPLED)].tolist()
    return kept


def as_patches(inputs: Inputs, config: Any) -> tuple[Tensor, list[list[int]]]:
    """Pixel values patch by patch, in the blocks that become one token, and how many patches images are high and wide.
    Some image processors give them so; others give whole images."""
    pixels = inputs["pixel_values"]
    if pixels.ndim == 2:
        return pixels, inputs["image_grid_thw"][:, 1:].tolist()
    side = config.vision_config.patch_size
    high, wide = (n // side for n in pixels.shape[2:])
    tokens = int((inputs["input_ids"] == config.image_token_id).sum())
    block = math.isqrt(len(pixels) * high * wide // tokens)
    cut = pixels.unflatten(3, (-1, block, side)).unflatten(2, (-1, block, side)).permute(0, 2, 5, 3, 6, 1, 4, 7)
    return cut.reshape(-1, pixels.shape[1] * side * side), [[high, wide]] * len(pixels)


def save(path: Path, tensors: dict[str, Any]) -> None:
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path)


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
