"""One of the trainers that `bench/peers.py` measures, in a process of its own: it loads the model once and trains some
steps of every row with several micro-batches, through that trainer's own loop, collator and loader workers.

A question is a row of a batch: none of them computes an image once for several questions. Nothing is imported from
`sameday`, except for an image processor where torchvision is missing."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import Trainer, TrainerCallback, TrainingArguments

Job = Mapping[str, Any]
Question = dict[str, str]
Make = Callable[[list[Question], int, TrainerCallback], Any]
"""A trainer over these questions, with so many in a micro-batch."""

BATCH = 16
"""Questions of an optimizer step."""
MICRO = (16, 8, 4)
UNSLOTH_MICRO = (4, 8)
"""Micro-batches that a row tries, until one is slower than another; a later row begins with what was best before.
Unsloth compiles for each of them, for most of a minute."""
WARM, TRIED, WORSE = 3, 3, 1.03
"""Steps before the timed ones; timed steps after which a setting is given up that is so many times slower than the
best one."""
ENOUGH = 5
"""Timed steps that are a result where the time ends before all of them."""
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
IGNORED = -100
WORKERS, SHARED = 8, 2**30
"""Loader workers, and bytes of shared memory that each may need: two batches of 16 large images."""


class Clock(TrainerCallback):
    """Marks the end of each step on the device's own clock, so that nothing waits for the measurement, and stops the
    trainer: after `steps` timed ones, when the time is over, or when the setting is slower than the `best` so far."""

    def __init__(self, steps: int, until: float, best: float | None) -> None:
        self.steps, self.until, self.best = steps, until, best
        self.late = self.slower = False
        self._marks: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._marks.append(mark())
        timed = len(self._marks) - WARM
        self.late = timed < self.steps and time.time() > self.until
        if timed == TRIED and self.best is not None:
            self.slower = statistics.median(self.seconds()) > WORSE * self.best
        control.should_training_stop = self.late or self.slower or timed >= self.steps

    def seconds(self) -> list[float]:
        """Of each step after the first ones."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks = self._marks[WARM - 1 :]
        return [between(a, b) for a, b in itertools.pairwise(marks)]


def mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    seconds: float = second - first if isinstance(first, float) else first.elapsed_time(second) / 1000
    return seconds


# The trainers


def plain(job: Job, **more: Any) -> Make:
    """transformers' Trainer, PEFT's adapters, and the collator that every user writes."""
    model = get_peft_model(base_model(job), LoraConfig(**LORA))
    collate = Collator(processor_of(job["model"]))

    def make(questions: list[Question], micro: int, clock: TrainerCallback) -> Any:
        settings = TrainingArguments(**arguments(job, micro), **more)
        return Trainer(model, settings, data_collator=collate, train_dataset=questions, callbacks=[clock])

    return make


def liger(job: Job) -> Make:
    return plain(job, use_liger_kernel=True)


def trl(job: Job) -> Make:
    """TRL's SFTTrainer with its own collator, on prompts and completions: it learns the answers alone."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as Picture
    from trl import SFTConfig, SFTTrainer

    model = get_peft_model(base_model(job), LoraConfig(**LORA))
    processor = processor_of(job["model"])
    turn = List({"role": Value("string"), "content": Value("string")})
    features = Features({"prompt": turn, "completion": turn, "images": List(Picture())})

    def make(questions: list[Question], micro: int, clock: TrainerCallback) -> Any:
        rows = [
            {
                "prompt": [{"role": "user", "content": each["question"]}],
                "completion": [{"role": "assistant", "content": each["answer"]}],
                "images": [each["image"]],
            }
            for each in questions
        ]
        settings = SFTConfig(**arguments(job, micro), max_length=None)
        data = Dataset.from_list(rows, features=features)
        return SFTTrainer(model, settings, train_dataset=data, processing_class=processor, callbacks=[clock])

    return make


def unsloth(job: Job) -> Make:
    """Unsloth's model and collator in TRL's SFTTrainer, which it patches; `unsloth` was imported before all others."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as Picture
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastVisionModel
    from unsloth.trainer import UnslothVisionDataCollator

    base, processor = FastVisionModel.from_pretrained(
        job["model"],
        max_seq_length=4096,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        load_in_16bit=True,
        use_gradient_checkpointing=False,
        offload_embedding=False,
    )
    # Its own names for "the decoder's attention": without them it adapts the tower too.
    parts = {"finetune_vision_layers": False, "finetune_language_layers": True}
    parts |= {"finetune_attention_modules": True, "finetune_mlp_modules": False}
    model = FastVisionModel.get_peft_model(base, **LORA, **parts, use_gradient_checkpointing=False, random_state=0)
    part = {"type": Value("string"), "text": Value("string")}
    turn = {"role": Value("string"), "content": List(part)}
    features = Features({"messages": List(turn), "images": List(Picture())})

    def make(questions: list[Question], micro: int, clock: TrainerCallback) -> Any:
        FastVisionModel.for_training(model)
        collate = UnslothVisionDataCollator(
            model,
            processor,
            resize="max",  # leaves images as they are
            train_on_responses_only=True,
            instruction_part="<|im_start|>user\n",
            response_part="<|im_start|>assistant\n",
            num_proc=1,
        )
        rows = [{"messages": messages_of(each), "images": [each["image"]]} for each in questions]
        own = {"max_length": None, "dataset_text_field": "", "dataset_kwargs": {"skip_prepare_dataset": True}}
        return SFTTrainer(
            model=model,
            args=SFTConfig(**arguments(job, micro), **own),
            data_collator=collate,
            train_dataset=Dataset.from_list(rows, features=features),
            processing_class=processor,
            callbacks=[clock],
        )

    return make


PEERS: dict[str, Callable[[Job], Make]] = {"trainer": plain, "trl": trl, "liger": liger, "unsloth": unsloth}


def arguments(job: Job, micro: int) -> dict[str, Any]:
    """What all of them are told. Nothing is logged or saved while steps are timed."""
    gpu = job["device"] == "cuda"
    workers = max(2, min(WORKERS, (os.cpu_count() or 1) - 2, shutil.disk_usage("/dev/shm").free // SHARED))
    return {
        "output_dir": job["scratch"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": BATCH // micro,
        "max_steps": WARM + job["steps"],
        "learning_rate": 5e-5,
        "optim": "adamw_torch_fused",
        "bf16": gpu,
        "use_cpu": not gpu,
        "gradient_checkpointing": False,
        "torch_compile": job["compile"],
        "train_sampling_strategy": "sequential",  # the questions of a step are then those of ours
        "dataloader_num_workers": workers,
        "dataloader_prefetch_factor": 2,
        "dataloader_pin_memory": gpu,
        "accelerator_config": {"non_blocking": gpu},
        "remove_unused_columns": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def base_model(job: Job) -> Any:
    # By its number: Trainer takes a model on "cuda" for one that is spread over several.
    kind, place = (torch.bfloat16, 0) if job["device"] == "cuda" else (torch.float32, "cpu")
    return transformers.AutoModelForImageTextToText.from_pretrained(
        job["model"], dtype=kind, attn_implementation="sdpa", device_map={"": place}
    )


def processor_of(folder: str) -> Any:
    if find_spec("torchvision") is not None:
        return transformers.AutoProcessor.from_pretrained(folder)
    from sameday.verify.peer.loop import load_processor

    own = {"revision": None, "min_pixels": None, "max_pixels": None, "image_backend": "pil"}
    return load_processor({"model": folder, **own})


# Questions as batches


def messages_of(question: Question) -> list[dict[str, Any]]:
    asked = [{"type": "image", "text": None}, {"type": "text", "text": question["question"]}]
    said = [{"type": "text", "text": question["answer"]}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


class Collator:
    """Of questions a padded batch, labels at the answers and the token that ends them."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, questions: Sequence[Question]) -> dict[str, Any]:
        chats = [messages_of(each) for each in questions]
        prompts = [self._text(chat[:1], True) for chat in chats]
        # Behind the end token the chat template has a line break, which nobody needs to learn.
        texts = [self._text(chat, False).rstrip("\n") for chat in chats]
        answers = [text.removeprefix(prompt) for text, prompt in zip(texts, prompts, strict=True)]
        images = [[Image.open(each["image"]).convert("RGB")] for each in questions]
        batch = self.processor(
            text=texts, images=images, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False
        )
        labels = torch.full_like(batch["input_ids"], IGNORED)
        ends = batch["attention_mask"].sum(1).tolist()
        for row, (end, answer) in enumerate(zip(ends, answers, strict=True)):
            count = len(self.processor.tokenizer(answer, add_special_tokens=False)["input_ids"])
            labels[row, end - count : end] = batch["input_ids"][row, end - count : end]
        return {**batch, "labels": labels}

    def _text(self, chat: list[dict[str, Any]], generate: bool) -> str:
        text: str = self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate)
        return text


# The measurement


def candidates(known: int | None, last: int | None, first: Sequence[int]) -> Sequence[int]:
    """Micro-batches to try: what was best for such images; or all, what was best before and smaller ones first."""
    if known is not None:
        return (known,)
    if last is None:
        return first
    return (last, *sorted((each for each in first if each != last), key=lambda each: (each > last, -each)))


def measured(job: Job) -> Iterator[dict[str, Any]]:
    """A result for each row and micro-batch that was tried."""
    make = PEERS[job["peer"]](job)
    print(f"loaded, {job['until'] - time.time():.0f} s left", flush=True)
    best_of: dict[str, int] = {}
    last: int | None = None
    for row in job["rows"]:
        questions = [json.loads(line) for line in Path(row["questions"]).read_text().splitlines()]
        best, most = None, BATCH
        usual_micro = UNSLOTH_MICRO if job["peer"] == "unsloth" else MICRO
        for micro in candidates(best_of.get(row["images"]), last, job.get("micro") or usual_micro):
            if micro > most or time.time() > job["until"]:
                continue
            result = timed(make, questions, micro, job, best)
            yield {"row": row["name"], "micro": micro, **result}
            if result.get("memory"):
                most = micro // 2
                continue
            if "seconds" in result:
                usual = statistics.median(result["seconds"])
                if best is not None and usual >= best:
                    break
                best, last = usual, micro
                best_of[row["images"]] = micro
            elif result.get("slower"):
                break


def timed(make: Make, questions: list[Question], micro: int, job: Job, best: float | None) -> dict[str, Any]:
    """Seconds of each timed step, the memory that the allocator held, and the GPU; or why there are none."""
    gc.collect()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(job["steps"], job["until"], best)
    try:
        make(questions, micro, clock).train()
    except torch.OutOfMemoryError:
        return {"why": "out of memory", "memory": True}
    except Exception as error:  # whatever another package raises is a result: the next setting may work
        traceback.print_exc()
        return {"why": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"}
    seconds = clock.seconds()
    if clock.slower or (clock.late and len(seconds) < ENOUGH):
        usual = f", {statistics.median(seconds):.3f} s each" if seconds else ""
        late = f"out of time after {len(seconds)} of {job['steps']} timed steps"
        return {"why": f"{'slower' if clock.slower else late}{usual}", "slower": clock.slower}
    held, device = (torch.cuda.max_memory_reserved() / 2**30, torch.cuda.get_device_name()) if gpu else (0.0, "CPU")
    return {"seconds": seconds, "held": held, "device": device}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    with Path(job["out"]).open("w") as file:
        for result in measured(job):
            file.write(json.dumps(result) + "\n")
            file.flush()
