"""Whether an old trainer's loss weighs each answer token the same or each question, which no key of a config says.

transformers' Trainer hands the number of a step's answer tokens to models whose forward accepts it, and their loss is
divided by it once. With the other models each micro-batch's loss is a mean over its own answer tokens, and a step's is
the mean over its micro-batches.
"""

from __future__ import annotations

from sameday.spec.convert.families import FAMILIES
from sameday.spec.convert.settings import Settings

_WHOLE = "transformers 5's Trainer divides a step's loss of {} by all of its answer tokens"
_ACROSS = "average_tokens_across_devices"


def loss_weight(work: Settings) -> tuple[str, str]:
    """The recipe's loss_weight, and why. Called when effective_batch and max_questions are set."""
    if work.trainer.loss_weight is not None:
        return work.trainer.loss_weight
    at_once, batch = work.new["plan"].values["max_questions"], work.new["recipe"].values["effective_batch"]
    own = work.trainer.micro_batch_loss
    whole = None if work.family is None else work.family.whole_step_loss
    if whole and not own:
        return "token", _WHOLE.format("this model") + _apart(work)
    if at_once == batch and at_once != 1:  # on one device; sameday knows of no others
        said = own or "the Trainer divides it by its answer tokens"
        return "token", f"a step is one micro-batch: {said}; on several devices near, not the same"
    doubt = f"; {_unless()}" if whole is None and not own else ""
    if at_once == 1:
        said = own or "the Trainer divides the loss of each micro-batch by its own answer tokens"
        return "sample", f"{said}, and at one question at a time weighs each question the same{doubt}"
    return "sample", (
        f"near, not the same: {own or 'the Trainer'}{', so that it' if own else ''} weighs by token inside a "
        f"micro-batch of several questions, and each micro-batch the same{doubt}"
    )


def _apart(work: Settings) -> str:
    if work.get(_ACROSS, bool) is not False:
        return ""
    return f"; {_ACROSS} is false: on several devices near, not the same, as each divided by its own answer tokens"


def _unless() -> str:
    """The doubt about a model whose family is not known."""
    kinds = [kind for kind, facts in FAMILIES.items() if facts.whole_step_loss]
    of = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
    return f"if the model is of {of}, set token: {_WHOLE.format('these')}"
