"""How far two arms may be apart. Every limit lies above what equivalent plans were measured to give: in float32 about
ten times as far as the furthest of 100 comparisons (`make soak`), in bf16 above the furthest of 100 on a CPU and of 20
with a model of 2.0 B parameters on an H200 (`bench/verify.py alarms`), where few answers make R uncertain."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sameday.spec.recipe import Recipe

FEW = 8.0
"""bf16: by chance alone the logarithm of R and the slope, in units of the error, spread as one over the root of how
many numbers they are of. So many times that is allowed. With errors in proportion to the numbers, which spread the
most, about 4 in 1000 tensors of eight numbers are beyond it, and 2 in 10000 of forty; without it 200 and 23 in 1000
would be."""


@dataclass(frozen=True)
class Limits:
    """Of a comparison in float32 unless a name says otherwise."""

    gradient: float = 1e-5
    """Relative difference of a whole gradient at the starting weights."""
    tensor: float = 1e-4
    """The same of one tensor's gradient."""
    loss: float = 2e-5
    """Relative difference of a step's loss or of the validation loss, once the arms have trained."""
    question: float = 10.0
    """How many times that a single question's loss may be off: a step's is a mean of many."""
    trained_gradient: float = 1e-3
    """Relative difference of a gradient once the arms have trained: AdamW turns the rounding of small gradient
    entries into updates of full size."""
    update: float = 1e-2
    """Relative difference of weights minus starting weights."""
    replay: float = 2e-3
    """Relative difference of an arm's own update from AdamW in float64 on the arm's own gradients, beyond what storing
    weights in float32 takes of it."""
    ratio_all: float = 1.35
    """bf16: R of all tensors together."""
    ratio_group: float = 1.8
    """bf16: R of the tensors of one kind."""
    ratio_tensor: float = 4.0
    """bf16: R of one tensor."""
    slope: float = 0.6
    """bf16: how much further the slope of one kind of tensors on the reference is from 1 than the plain plan's, in
    units of the plain plan's relative error."""
    bf16_loss: float = 3e-2
    bf16_trained_gradient: float = 0.8
    bf16_update: float = 0.7
    bf16_norm: float = 0.4
    """bf16: relative difference of a gradient's norm, which is never more than that of the gradient."""
    bf16_turned: float = 0.1
    """bf16: share of the validation samples whose answers rounding may turn."""

    generation: float = 1e-3
    """How far a generated token may be below the one that training would have chosen, in standard deviations of the
    logits: more than a tie that rounding broke."""
    bf16_generation: float = 0.25
    """With a real vocabulary the furthest of eight models on a CPU was at 0.06 (`bench/verify.py answers`)."""

    doubtful: float = 1e-2
    """Relative difference of float32 gradients up to which a reference in float64 is asked."""

    def ratio(self, name: str, numbers: float) -> float:
        """The limit of this R where it is of so many numbers: a bias of two classes has few."""
        return max(float(getattr(self, name)), math.exp(min(FEW / math.sqrt(max(1.0, numbers)), FEW)))

    def slope_of(self, numbers: float) -> float:
        return max(self.slope, FEW / math.sqrt(max(1.0, numbers)))

    def looser(self, error: float) -> Limits:
        """For a float32 plan that is itself so far from float64: what holds once the arms have trained grows with it.
        Gradients at the start are judged by R then."""
        factor = max(1.0, error / self.gradient)
        names = ("loss", "trained_gradient", "update")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def noisier(self, error: float) -> Limits:
        """For a bf16 plan whose gradient is itself so far from float32: two such gradients are further apart than each
        is from the reference, by the root of two where nothing is wrong."""
        names = {"bf16_trained_gradient": 2.0, "bf16_update": 2.0, "bf16_norm": 1.0}
        return replace(self, **{name: max(getattr(self, name), times * error) for name, times in names.items()})

    def trained(self, half: bool) -> dict[str, float]:
        """The limits that hold once the arms have trained, by measure."""
        loss = self.bf16_loss if half else self.loss
        return {
            "loss": loss,
            "question": self.question * loss,
            "validation": loss,
            "norm": self.bf16_norm if half else self.trained_gradient,
            "trained gradient": self.bf16_trained_gradient if half else self.trained_gradient,
            "trained update": self.bf16_update if half else self.update,
            "replay": self.replay,
        }


LIMITS = Limits()

ACROSS = replace(LIMITS, ratio_all=1.8, ratio_group=3.0, ratio_tensor=6.0, slope=2.0)
"""Of two trainers in bf16, who round at different places: a frozen tower computes its norms in bf16 here and, under
autocast, in float32 there. The furthest of 37 comparisons with tiny models on a CPU had R 1.31 of all tensors, 2.03 of
one kind, and a slope 1.17 of the error off."""

COARSE = replace(LIMITS, bf16_generation=1.5)
"""Of matmuls in fp8: R follows their error, what is generated does not. The furthest of eight models was at 0.67, and
with a position that is off by one none was nearer than 3.06."""


def limits_of(recipe: Recipe) -> Limits:
    return COARSE if recipe.coarse_matmuls else LIMITS
