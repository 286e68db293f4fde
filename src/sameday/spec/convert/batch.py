"""How many questions a step of the old trainer took: at once, accumulated, and by how many processes."""

from __future__ import annotations

from sameday.spec.convert import keys
from sameday.spec.convert.conversion import show
from sameday.spec.convert.settings import ABSENT, Settings


def batch(work: Settings) -> None:
    """Sets effective_batch, and how many questions the trainer took at once."""
    _machines(work)
    per_device, accumulation = "per_device_train_batch_size", "gradient_accumulation_steps"
    size, times = work.get(per_device, int), work.get(accumulation, int)
    if size is None:
        size = 8
        work.default("plan.max_questions", size, per_device)
    else:
        work.put("plan.max_questions", size, [per_device], "questions at once")
    several, world = _of_several(work), work.world()
    told = [name for name in keys.WORLD if work.get(name, int) is not None]
    for name in keys.WORLD:
        if name not in told:
            work.drop(name, "null: one")
    said = f"x {world} processes" if any(map(work.counts, told)) else "" if told else f"; {several}"
    for name in [name for name in told if not work.counts(name)]:
        doubt = work.why.get(name) or f"how many {show(work.old[name][1])} were is not known"
        said += f"; {doubt}: {_of_several(work).removeprefix(f'{work.several}, ')}"
    if told == ["num_nodes"]:
        said += "; if each machine had several devices, multiply by their number"
    said += "".join(f"; {work.why[name]}" for name in told if work.counts(name) and name in work.why)
    if times is None and not told:
        work.default("recipe.effective_batch", size, accumulation, f"{size} at once, none accumulated; {several}")
        return
    if times is None:
        work.drop(accumulation, "null: none")
    whole = isinstance(size, int) and isinstance(times, int | None)
    together = size * (times or 1) * world if whole and times != 0 else times
    why = f"{size} at once x {1 if times is None else times} accumulated {said}".replace(" ;", ";")
    work.put("recipe.effective_batch", together, [*([accumulation] if times is not None else []), *told], why)


def _of_several(work: Settings) -> str:
    """What to do with the batch where the number of processes is not known."""
    times = work.old.get("gradient_accumulation_steps")
    if work.trainer.short == "swift" and times is not None and times[0].startswith(ABSENT):
        return f"{work.several}, ms-swift accumulates less by default: a step keeps about 16 questions"
    return f"{work.several}, multiply by their number"


def _machines(work: Settings) -> None:
    """accelerate counts the processes of all machines together."""
    count = work.get("num_machines", int)
    if count not in (None, 1) and work.get("num_processes", int) is None:
        work.refuse("num_machines", "and num_processes, which counts the processes of all machines, is not given")
    else:
        work.drop("num_machines", "num_processes counts the processes of all machines")
