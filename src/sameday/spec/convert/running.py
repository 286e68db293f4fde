"""What an old config says about how a run goes: speed, how often to save and evaluate, which weights are the result."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from sameday.spec.convert.conversion import show
from sameday.spec.convert.settings import ABSENT, Settings
from sameday.spec.vqa import VqaRecipe

_BY_ITSELF = "without eval_steps {0} evaluates as often as it logs, and how often that is by default it decides itself"


class Running(Settings):
    """Each method makes of some of the old settings what plan and recipe have for them."""

    def speed(self) -> None:
        fields = {"gradient_checkpointing": ("checkpointing", "full"), "torch_compile": ("compile", "layers")}
        for name, (field, on) in fields.items():
            if self.is_null(name) and name in self.trainer.own_nulls:
                self.put(f"plan.{field}", "none", [name], self.trainer.own_nulls[name])
            elif self.get(name, bool) is None:
                self.drop(name, "null: the default")
            else:
                self.put(f"plan.{field}", on if self.get(name, bool) else "none", [name])

    def intervals(self) -> None:
        """How often to save, evaluate and log. The model is the same: what is unclear takes the default."""
        logged = self._as_often_as_it_logs()
        for what, none in (("save", "epoch"), ("eval", None)):
            strategy, steps = self.text(f"{what}_strategy").lower(), self._steps(what)
            field, names = f"plan.{what}_steps", [f"{what}_strategy"]
            if self.is_set(field):
                continue
            if strategy in ("no", "false"):  # YAML 1.1 reads `no` as false
                self.put(field, none, names, "saved so often at least" if none else "at the end")
            elif strategy in ("epoch", "best"):
                self.put(field, "epoch", names)
            elif isinstance(steps, int) and not isinstance(steps, bool):
                why = f"{show(self.old[f'{what}_steps'][1])} of all steps" if self._is_share(what) else ""
                if what == "eval" and logged:
                    self.put(field, steps, names, why)
                    self.default(field, steps, "eval_steps", logged)
                else:
                    self.put(field, steps, [f"{what}_steps", *names], why)
                continue
            elif self._is_share(what):
                why = f"a share of all steps, and how many there are is not known here; {field} is a number of them"
                for name in (f"{what}_steps", *names):
                    self.drop(name, why)
                continue
            elif strategy == "steps" and what == "eval":
                self.drop(names[0], _BY_ITSELF.format(self.trainer.name))
                continue
            elif strategy == "steps":
                self.put(field, 500, names, "the Trainer's default")
            else:
                self.drop(names[0], f"{field} has no such choice")
            chosen = self.new["plan"].values.get(f"{what}_steps", "epoch")
            self.drop(f"{what}_steps", f"not used: {field} is {show(chosen)}")
        steps = self.get("logging_steps", int)
        if isinstance(steps, int):
            self.put("plan.log_steps", steps, ["logging_steps"])
        else:
            self.drop("logging_steps", "plan.log_steps is a number of steps")

    def _as_often_as_it_logs(self) -> str:
        """Where nothing says how often, the Trainer evaluates when it logs. Returns why."""
        if self.text("eval_strategy").lower() != "steps" or self.get("eval_steps", int) not in (None, 0):
            return ""
        every = self.get("logging_steps", float) or self.trainer.logging_steps
        self.drop("eval_steps", "0 or null: as often as it logs")
        if every is None:
            self.done("eval_steps")
            return ""
        key = f"{ABSENT}eval_steps"
        self.leaves[key] = every
        self.old["eval_steps"] = (key, every)
        return "without eval_steps the Trainer evaluates as often as it logs"

    def _is_share(self, what: str) -> bool:
        """Below 1 the Trainer takes an interval for a share of all steps."""
        steps = self.get(f"{what}_steps", int)
        return isinstance(steps, float) and 0 < steps < 1

    def _steps(self, what: str) -> Any:
        """An interval as a number of steps, as far as it is one or becomes one by max_steps."""
        steps, total = self.get(f"{what}_steps", int), self.get("max_steps", int)
        if self._is_share(what) and isinstance(total, int) and total > 0:
            return math.ceil(total * steps)
        return steps

    def best(self) -> None:
        """Which weights are the result. How often they are compared decides it too, so that it goes into the recipe."""
        first, metric, greater = "load_best_model_at_end", "metric_for_best_model", "greater_is_better"
        if self.get(first, bool) is not True:
            for name in (first, metric, greater):
                self.drop(name, "the result is the last weights; the best checkpoint is kept beside them")
            return
        asked = self.text(metric).removeprefix("eval_") or "loss"
        every, near = self._compared()
        if asked not in VqaRecipe.scores:
            self.refuse(metric, f"no such validation score is known (allowed: {', '.join(VqaRecipe.scores)})")
        elif self.get(greater, bool) not in (None, asked != "loss"):
            self.refuse(greater, f"the best {asked} is the {'lowest' if asked == 'loss' else 'highest'}")
        elif every is None or not self.new["recipe"].values.get("data", {}).get("val"):
            remedy = "give --val FILE" if every is not None else "give eval_strategy, epoch or steps"
            self.refuse(first, f"without validation the best weights cannot be known: {remedy}")
        elif self.text("eval_strategy").lower() == "steps" and self.get("eval_steps", int) in (None, 0):
            why = _BY_ITSELF.format(self.trainer.name)
            self.refuse("eval_strategy", f"{why}, which decides the best weights: give eval_steps")
        elif self._is_share("eval") and not self.is_set("plan.eval_steps"):
            why = "a share of all steps, and how many there are is not known here, which decides the best weights"
            self.refuse("eval_steps", f"{why}: give max_steps, or eval_steps as a number of steps")
        elif self._begins_late(every):
            first_compared = "1, the first epoch" if every == "epoch" else f"{every}, the first comparison"
            why = "earlier weights would be compared too, and no recipe leaves them out"
            self.refuse("eval_delay", f"{why} (allowed: at most {first_compared})")
        else:
            self.put("recipe.best", {"metric": asked, "every": every}, [first, metric, greater], near)

    def _compared(self) -> tuple[Any, str]:
        """How often weights are compared, and what differs. The Trainer keeps the best of what it evaluates only where
        it also saves a checkpoint then."""
        plan = self.new["plan"].values
        every, saved = plan.get("eval_steps", "epoch"), plan.get("save_steps", 500)
        rare = isinstance(every, int) and isinstance(saved, int) and saved > every and saved % every == 0
        if not rare or self.text("save_strategy").lower() in ("no", "false", "best"):
            return every, ""
        how = "save_steps" if self.given("save_steps") else "save_steps by default"
        return saved, (
            f"near, not the same: the Trainer's result is one of the weights that it saved, every {saved} steps "
            f"({how}), and no longer a new one where it found better ones between them, every {every} steps"
        )

    def _begins_late(self, every: Any) -> bool:
        """Whether the first weights that could be compared were not."""
        delay = self.get("eval_delay", float)
        return isinstance(delay, int | float) and delay > (1 if every == "epoch" else every)

    def name(self) -> None:
        where = "the run folder is chosen with --out"
        for name in ("run_name", "output_dir"):
            clean = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.text(name)).name).strip("-.")
            if clean and "name" not in self.new["recipe"].values:
                self.put("recipe.name", clean, [name], where if name == "output_dir" else "")
            else:
                self.drop(name, where if name == "output_dir" else "no name in it")
