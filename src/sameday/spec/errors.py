"""The one exception for mistakes a user can mend, and the codes a command leaves with."""

from collections.abc import Iterable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
EXIT_OUT_OF_MEMORY = 4
EXIT_DISK_FULL = 5
EXIT_STOPPED = 75  # asked to stop, checkpoint saved: run the same command again to go on (EX_TEMPFAIL)


class BadInput(ValueError):
    """Names the bad value, where it stands, and what is allowed. Shown to the user without a traceback."""

    code = EXIT_BAD_INPUT
    alone = True
    """As of RunStopped: False where every rank has it, so that the first one says it for all."""


class DiskTooSmall(BadInput):
    """What a command was to write has no room, which is known before it is written, or what was written stays."""

    code = EXIT_DISK_FULL


class NothingToLearn(BadInput):
    """The recipe leaves no sample of the data, and nothing else is wrong: one of several trainings may be left out."""


def refuse(problems: Iterable[str]) -> None:
    """All of them at once, where there are any."""
    if lines := list(problems):
        raise BadInput("\n".join(lines))


def in_short(error: BaseException) -> str:
    """Its first line, and the second one where the first only announces it."""
    first, *more = str(error).splitlines() or [""]
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first


class RunStopped(Exception):
    """A run that ended before its last step, with the exit code that says why. `alone`: on this rank only, so that no
    other says it."""

    def __init__(self, message: str, code: int, alone: bool = False) -> None:
        super().__init__(message, code, alone)  # all of it, because it goes from one rank to another
        self.code, self.alone = code, alone

    def __str__(self) -> str:
        return str(self.args[0])


class EvaluationGivenUp(RunStopped):
    """Asked to stop in an evaluation, on all ranks alike. What was asked for is done when the run goes on."""

    def __init__(self, *_again: object) -> None:
        super().__init__("asked to stop in an evaluation; run again to go on", EXIT_STOPPED)


class CompileFailed(RunStopped):
    """torch.compile could not do it. The same run can go on without."""


class FailedElsewhere(RunStopped):
    """Another rank met a bug, of which it has the traceback: no rank goes on, or saves."""


SAID = (BadInput, RunStopped)
"""Errors that are a sentence for users; any other is a bug, and has a traceback."""
