"""The work of `bench/real.py` through what a user would pick instead: transformers' Trainer with PEFT, TRL's
SFTTrainer, liger-kernel, Unsloth. Each in its own process, at its best setting of those that are tried.

    python bench/peers.py OUT                                 one GPU, Qwen3-VL-8B's shapes; OUT/real.json stands beside
    python bench/peers.py OUT --only liger unsloth --rows "2 of 1280×1024" --seconds 120
    python bench/peers.py OUT --only unsloth --micro 4        with that micro-batch alone, where little time is left
    python bench/peers.py OUT --size tiny                     tries the script on a CPU

The same model folder, images, questions and order; LoRA r=4 on q, k, v and o with dropout 0.05, bf16, fused AdamW, 16
questions a step, no checkpointing. Each trainer reads images and makes batches by its own means, one question a row
(TRL learns one token more, the line break behind an answer). Of each row: the fastest of micro-batches of 16, 8 and 4
questions, tried until one is slower, with Unsloth, which compiles for each, of 4 and 8; seconds of a step, median
(least to most) of those after the first three, and their number, through the trainer's own loop; memory that the
allocator held; questions a second; how many times as long as ours in its first epoch, if that was measured on the same
GPU with a model of the same size. A trainer that is missing, fails or runs out of its time before five timed steps says
so in its row.
`--compile` asks Trainer, TRL and liger for `torch_compile`; Unsloth compiles by itself. OUT/peers.json has all of it,
OUT/peers/NAME.log what a trainer printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from beside import OURS, PEERS, read, table
from rows import BATCH, ROWS, Row, data_of, model_of, recipe_of, row_name, samples_of

from sameday.tasks.vqa.plain import conversation

NAMES = ("trainer", "trl", "liger", "unsloth")
MEASURED = ("768×576, by_image", "2 of 1280×1024")
"""In the order of their worth, if the time does not suffice for all."""
SECONDS = {"trainer": 110, "trl": 110, "liger": 110, "unsloth": 300}
"""Of each trainer, its start included."""
GRACE = 20
"""Seconds after the end of its time in which a trainer may end by itself."""
ALONE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "WANDB_DISABLED": "true",
}
"""Nothing is looked for on the network."""


def questions_of(out: Path, name: str, row: Row, tiny: bool) -> list[dict[str, str]]:
    """Those of the first epoch, in the order in which our loop has them."""
    fields = recipe_of(out, data_of(out, name, row, tiny), row, tiny) | {"num_epochs": 1}
    return [flat(conversation(sample)) for step in samples_of(out, fields) for sample in step]


def flat(asked: Mapping[str, Any]) -> dict[str, str]:
    """An image, what is asked about it, and the answer."""
    user, assistant = asked["messages"]
    picture, question = user["content"]
    (image,), (answer,) = asked["images"], assistant["content"]
    assert picture["type"] == "image", "the image comes before the question"
    return {"image": str(image), "question": question["text"], "answer": answer["text"]}


def model_for(out: Path, most: int) -> Path:
    """The model's folder with an image processor that leaves images of up to `most` pixels as they are."""
    folder = out / "peers" / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for file in (out / "model").iterdir():
        if file.name != "preprocessor_config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    settings = json.loads((out / "model" / "preprocessor_config.json").read_text())
    settings["size"] = settings["size"] | {"longest_edge": most}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def rows_of(out: Path, names: Sequence[str], tiny: bool) -> list[dict[str, str]]:
    """Each with a file of its questions. Rows whose images have the same sizes have the same `images`."""
    rows = []
    for number, name in enumerate(names):
        file = out / "peers" / f"questions-{number}.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in questions_of(out, name, ROWS[name], tiny)))
        sizes = sorted({size for size, _ in ROWS[name].pictures or ()})
        rows.append({"name": name, "questions": str(file), "images": str(sizes or name)})
    return rows


def job_of(out: Path, peer: str, rows: Sequence[Mapping[str, str]], args: argparse.Namespace) -> dict[str, Any]:
    tiny, folder = args.size == "tiny", out / "peers"
    most = recipe_of(out, out, next(iter(ROWS.values())), tiny)["max_pixels"]
    return {
        "peer": peer,
        "model": str(model_for(out, most)),
        "rows": rows,
        "device": "cpu" if tiny else "cuda",
        "steps": args.steps,
        "micro": args.micro,
        "compile": args.compile and peer != "unsloth",
        "scratch": str(folder / f"{peer}-scratch"),
        "out": str(folder / f"{peer}.jsonl"),
    }


def run(job: Mapping[str, Any], folder: Path, seconds: float) -> str:
    """The trainer's process, and how it ended in words; what it has measured by then lies in its file."""
    peer, log = job["peer"], folder / f"{job['peer']}.log"
    Path(job["out"]).unlink(missing_ok=True)
    (folder / f"{peer}.json").write_text(json.dumps({**job, "until": time.time() + seconds}))
    paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
        "UNSLOTH_COMPILE_LOCATION": str(folder / "unsloth-compiled"),
    }
    # Unsloth patches what is imported after it.
    start = "import unsloth\n" * (peer == "unsloth") + "import peer\npeer.main()"
    command = [sys.executable, "-c", start, str(folder / f"{peer}.json")]
    with log.open("w") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, cwd=folder, env={**os.environ, **ALONE, **own}, start_new_session=True
        )
        try:
            code = process.wait(seconds + GRACE)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its loader workers
                process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    return "" if code == 0 else f"{lines[-1][:200] if lines else f'exit code {code}'} ({log})"


def results(peer: str, size: str, rows: Sequence[str], file: Path, ended: str) -> Iterator[dict[str, Any]]:
    """The best setting of each row, with all that was tried."""
    tried = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    for name in rows:
        own = [each for each in tried if each["row"] == name]
        good = [each for each in own if "seconds" in each]
        words = [f"{setting(each)}: {each['why']}" for each in own if "why" in each]
        if not good:
            yield {
                "row": name,
                "peer": peer,
                "why": "; ".join([*words, *filter(None, [ended])]) or "no time was left for it",
            }
            continue
        best = min(good, key=lambda each: statistics.median(each["seconds"]))
        usual = statistics.median(best["seconds"])
        yield {
            "row": name,
            "peer": peer,
            "size": size,
            "device": best["device"],
            "median": usual,
            "least": min(best["seconds"]),
            "most": max(best["seconds"]),
            "steps": len(best["seconds"]),
            "held": best["held"],
            "samples_per_second": BATCH / usual,
            "setting": setting(best),
            "tried": own,
        }


def setting(one: Mapping[str, Any]) -> str:
    return f"{one['micro']}×{BATCH // one['micro']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rows", nargs="+", type=row_name, choices=tuple(ROWS), default=MEASURED)
    parser.add_argument("--steps", type=int, default=10, help="that are timed")
    parser.add_argument("--micro", type=int, nargs="+", choices=(4, 8, 16), help="that are tried")
    parser.add_argument("--seconds", type=float, help="of each trainer, its start included")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    out = args.out.absolute()
    (out / "peers").mkdir(parents=True, exist_ok=True)
    model_of(out, args.size == "tiny")
    found = [each for each in read(out / PEERS) if each["peer"] not in args.only or each["row"] not in args.rows]
    rows = rows_of(out, args.rows, args.size == "tiny")
    for peer in args.only:
        job = job_of(out, peer, rows, args)
        ended = run(job, out / "peers", args.seconds or SECONDS[peer])
        found += results(peer, args.size, args.rows, Path(job["out"]), ended)
        found.sort(key=lambda each: (tuple(ROWS).index(each["row"]), NAMES.index(each["peer"])))
        (out / PEERS).write_text(json.dumps(found) + "\n")
        print(f"{peer}: {ended or 'done'}", flush=True)
    print(table(read(out / OURS), found))


if __name__ == "__main__":
    main()
