"""The commands. Each imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from sameday.hardware.encoding import in_utf_8
from sameday.hardware.screen import go_on_without_output, guard_streams
from sameday.hardware.signals import finishes, stops_at_once
from sameday.spec import limits
from sameday.spec.errors import EXIT_DISK_FULL, BadInput, RunStopped, refuse
from sameday.spec.words import tell

app = typer.Typer(
    help="Train the same model, the same day.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


TOO_LARGE = "sameday.too_large"
"""Under which a command that is being read has sentences about its numbers."""


def _whole(bound: limits.Bound, help: str, least: int | None = None) -> Any:
    """An option that is a whole number. typer's own refusal of a large one has no reason, and comes alone."""

    def checked(context: typer.Context, option: typer.CallbackParam, value: int | None) -> int | None:
        try:
            bound.check(option.opts[0], value)
        except BadInput as error:
            context.meta.setdefault(TOO_LARGE, []).append(str(error))
        return value

    return typer.Option(min=least, help=help, callback=checked)


Sets = Annotated[
    list[str],
    typer.Option("--set", help="Change one field: recipe.learning_rate=1e-4, plan.token_budget=4096."),
]


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Where to put it.")] = Path("runs/demo")) -> None:
    """All of it in three minutes on a laptop: no GPU, no download."""
    from sameday.demo.show import show

    show(out)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="What model comes out (YAML).")],
    plan: Annotated[
        Path | None, typer.Option(help="How it is run (YAML). Without it: chosen for this machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/NAME-FINGERPRINT.")] = None,
    sets: Sets = [],  # noqa: B006 (typer reads it, nothing changes it)
    max_steps: Annotated[int | None, _whole(limits.RUN_STEPS, "Short for --set recipe.max_steps=N.")] = None,
    limit: Annotated[int | None, _whole(limits.SAMPLES, "Short for --set recipe.data.limit=N.")] = None,
    stop_after: Annotated[
        int | None, _whole(limits.RUN_STEPS, "Stop at this step, saved; the same command without it goes on.", least=1)
    ] = None,
    on_bad: Annotated[
        Literal["stop", "skip"] | None, typer.Option(help="Short for --set recipe.data.on_bad=….")
    ] = None,
) -> None:
    """Train, or go on with a run that was stopped: the same command again."""
    short = {"max_steps": max_steps, "data.limit": limit, "data.on_bad": on_bad}
    sets = [*sets, *(f"recipe.{name}={value}" for name, value in short.items() if value is not None)]
    with stops_at_once():
        from sameday.commands.launch import train_from_files

        train_from_files(recipe, plan, out, sets, stop_after)


@app.command()
def data(
    what: Annotated[
        list[str], typer.Argument(help="Files of questions, their folder, hf:OWNER/NAME, or a recipe (YAML).")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Name or folder: in its tokens, and as it reads questions. Default: the recipe's."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Write a recipe to start from; needs --model.")] = None,
    image_root: Annotated[
        Path | None, typer.Option(help="Folder that images are named from. Default: searched.")
    ] = None,
) -> None:
    """What a set of questions is like, on one screen: images, answers, duplicates, problems, what sharing gives."""
    from sameday.commands.data import inspect_data

    if recipe is not None:
        go_on_without_output()  # until it is written
    inspect_data(what, model, recipe, image_root)


@app.command("eval")
def evaluate(
    what: Annotated[Path, typer.Argument(help="Folder of a run, or a recipe (YAML).")],
    split: Annotated[
        Literal["train", "val", "test"] | None,
        typer.Option(help="Which part of the data. Default: recipe.evaluate's, or test."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="last, best or step-N: one of its checkpoints, also while it goes on. Default: its result."),
    ] = None,
    adapter: Annotated[Path | None, typer.Option(help="Somebody's PEFT adapter of the recipe's base model.")] = None,
    base: Annotated[bool, typer.Option("--base", help="The base model itself, as it was before training.")] = False,
    plan: Annotated[
        Path | None, typer.Option(help="How it is run (YAML). Default: the run's, or chosen for this machine.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of scores and answers. Default: in the run, or runs/NAME-FINGERPRINT-WEIGHTS-SPLIT."),
    ] = None,
    cascade: Annotated[
        bool | None,
        typer.Option("--cascade/--no-cascade", help="Answers of earlier stages go into the prompts of later ones."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, _whole(limits.NEW_TOKENS, "Longest answer, in tokens. Default: 64.", least=1)
    ] = None,
    scores_only: Annotated[bool, typer.Option("--scores-only", help="Generate no answers.")] = False,
    sets: Sets = [],  # noqa: B006 (typer reads it, nothing changes it)
) -> None:
    """Loss and other scores of a run's weights, or of others, and the answers that they generate."""
    with stops_at_once():
        from sameday.commands.evaluate import Request
        from sameday.commands.evaluate import evaluate as run

        run(Request(what, split, checkpoint, adapter, base, plan, out, cascade, max_new_tokens, scores_only, sets))


@app.command()
def cache(
    recipe: Annotated[Path, typer.Argument(help="Whose images (YAML).")],
    kind: Annotated[
        Literal["pixels", "features"],
        typer.Option(help="Decoded and resized images, or the frozen vision tower's output."),
    ],
    plan: Annotated[Path | None, typer.Option(help="Names the folder (cache_dir) and the workers (YAML).")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read every entry instead, and say which are bad: exit code 1.")
    ] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove entries that this recipe does not use.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="With --prune: of all other settings too.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time some steps too, and say what a cache gives. Features: always.")
    ] = False,
    sets: Sets = [],  # noqa: B006 (typer reads it, nothing changes it)
) -> None:
    """Prepare a recipe's images ahead of training, each content once."""
    from sameday.commands.launch import cache_from_files
    from sameday.tasks.setup import Caching

    if check + prune + measure > 1:
        raise BadInput("--check, --prune and --measure: one at a time")
    if everything and not prune:
        raise BadInput("--all belongs to --prune")
    what: Any = "check" if check else "prune all" if everything else "prune" if prune else "fill"
    asked = Caching(kind, what, measure)
    sys.exit(0 if cache_from_files(recipe, plan, sets, asked) else 1)


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="A run whose recipe trains adapters.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the whole model.")],
    checkpoint: Annotated[str | None, typer.Option(help="last, best or step-N. Default: the finished adapter.")] = None,
) -> None:
    """A run's adapter and its base model as one model, which transformers loads without PEFT."""
    from sameday.commands.merge import merge as run_merge

    run_merge(run, out, checkpoint)


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    repo: Annotated[str, typer.Argument(help="Its name on the Hub: USER/NAME.")],
    checkpoint: Annotated[str | None, typer.Option(help="last, best or step-N. Default: the finished weights.")] = None,
    private: Annotated[bool, typer.Option("--private", help="A new repository that only you see.")] = False,
    base: Annotated[str | None, typer.Option(help="The base model's name on the Hub, where it was a folder.")] = None,
    license: Annotated[str | None, typer.Option(help="What the card says: apache-2.0, cc-by-4.0, other.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder that would be pushed, and push nothing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="With --dry-run: that folder. Default: RUN/push.")] = None,
) -> None:
    """A run's weights to the Hub, with a model card written from its record."""
    from sameday.commands.push import push as run_push

    run_push(run, repo, checkpoint, private, base, license, dry_run, out)


@app.command()
def verify(
    what: Annotated[list[Path], typer.Argument(help="A recipe (YAML), or two finished runs of one recipe.")],
    plan: Annotated[Path | None, typer.Option(help="The plan to judge (YAML). Default: as `train` chooses it.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="The plan it must equal, or `transformers`: a plain loop of it and PEFT. Default: plain."),
    ] = None,
    steps: Annotated[int | None, _whole(limits.VERIFIED_STEPS, "Steps of each arm, at least 4. Default: 8.")] = None,
    precision: Annotated[
        Literal["float32", "bf16"] | None,
        typer.Option(help="Compare in this format. Default: the recipe's; against transformers float32."),
    ] = None,
    ranks: Annotated[
        int | None, _whole(limits.RANKS, "Processes that the plan's arm runs on. Default: 1.", least=1)
    ] = None,
    sets: Sets = [],  # noqa: B006 (typer reads it, nothing changes it)
    recipes: Annotated[
        bool, typer.Option("--recipes", help="Finished runs of different recipes: compare metrics over seeds.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything that was found here too.")] = None,
) -> None:
    """Whether a plan trains the same model. Exit 0: the same; 1: different; 2: could not be compared,
    or not decided."""
    from sameday.verify.command import verify as run

    asked = {"plan": plan, "against": against, "steps": steps, "precision": precision, "ranks": ranks, "sets": sets}
    sys.exit(run(what, asked, recipes, json))


@app.command()
def profile(
    recipe: Annotated[Path, typer.Argument(help="What model comes out (YAML).")],
    plan: Annotated[
        Path | None, typer.Option(help="How it is run (YAML). Without it: chosen for this machine.")
    ] = None,
    steps: Annotated[int, _whole(limits.TIMED_STEPS, "Steps that are timed.", least=1)] = 20,
    warmup: Annotated[int, _whole(limits.WARM_UP_STEPS, "Steps before them.", least=1)] = 5,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of a few steps here (.json, .json.gz), for ui.perfetto.dev.")
    ] = None,
    hardware: Annotated[
        bool, typer.Option("--hardware", help="Kernels, rates and environment variables instead; trains nothing.")
    ] = False,
    sets: Sets = [],  # noqa: B006 (typer reads it, nothing changes it)
    json: Annotated[Path | None, typer.Option(help="Write everything that was found here too.")] = None,
) -> None:
    """Where a step's time goes, what the hardware would need at least, and what each remedy could give at most."""
    from sameday.profile.command import hardware as list_hardware
    from sameday.profile.command import profile as run

    if hardware and (json is not None or trace is not None):
        option = "--json" if json is not None else "--trace"
        raise BadInput(f"--hardware has no {option}: it lists what is there")
    if hardware:
        list_hardware(recipe, plan, sets, tell)
    else:
        run(recipe, plan, sets, steps, warmup, json, tell, trace)


@app.command()
def tune(
    recipe: Annotated[Path, typer.Argument(help="What model comes out (YAML).")],
    minutes: Annotated[float, typer.Option(help="How long to search, at most 10080.")] = 10.0,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The plan that is found (YAML); one that is there is replaced.")
    ] = Path("plan.yaml"),
    sets: Sets = [],  # noqa: B006 (typer reads it, nothing changes it)
    json: Annotated[Path | None, typer.Option(help="Write everything that was measured here too.")] = None,
) -> None:
    """The fastest plan for this machine, what each choice in it is worth, and when a run would be finished."""
    from sameday.tune.command import tune as run

    sys.exit(run(recipe, out, sets, minutes, json, tell))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, finished or not.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file.")] = Path("report.html"),
    profile: Annotated[list[Path], typer.Option(help="One for each run. Default: profile.json in its folder.")] = [],  # noqa: B006
    tune: Annotated[list[Path], typer.Option(help="Likewise; tune.json.")] = [],  # noqa: B006
    verify: Annotated[list[Path], typer.Option(help="Likewise; verify.json.")] = [],  # noqa: B006
) -> None:
    """One HTML file about runs that opens anywhere, offline."""
    from sameday.report.page import report_from_files

    tell(f"written: {report_from_files(runs, out, profile, tune, verify)}")


@app.command()
def convert(
    old: Annotated[Path, typer.Argument(help="A config (YAML), or a shell script that starts the trainer.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for recipe.yaml and plan.yaml.")] = Path("."),
    drop: Annotated[list[str], typer.Option(help="Leave out this key, or section, whatever it says.")] = [],  # noqa: B006
    trainer: Annotated[
        str | None,
        typer.Option("--from", help="Whose it is: trainer, llamafactory, swift, trl, axolotl. Default: by its keys."),
    ] = None,
    train: Annotated[Path | None, typer.Option(help="File of training questions, instead of the config's.")] = None,
    val: Annotated[Path | None, typer.Option(help="File of validation questions, likewise.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder that image paths are relative to, likewise.")] = None,
) -> None:
    """A config of another trainer becomes a recipe and a plan; every key says where it went."""
    import os

    from sameday.models.families import known_families
    from sameday.spec.convert.config import convert as convert_file
    from sameday.spec.convert.conversion import render, write
    from sameday.spec.writing import check_folder

    given = {"--train": train, "--val": val, "--images": images}
    near = {name: Path(os.path.relpath(path, old.parent)).as_posix() for name, path in given.items() if path}
    check_folder(out, "-o")
    conversion = convert_file(old, known_families(), drop, trainer, near)
    paths = write(conversion, out)
    tell(conversion.recognised)
    tell(render(conversion.notes))
    tell(f"written: {', '.join(map(str, paths))}")


suite = typer.Typer(help="Many jobs as one: their graph, GPUs, and a deadline.", no_args_is_help=True)
app.add_typer(suite, name="suite")

SuitePath = Annotated[Path, typer.Argument(metavar="SUITE", help="The jobs (YAML).")]
SuiteOut = Annotated[Path | None, typer.Option("--out", help="Folder of all jobs. Default: runs/NAME.")]


@suite.command("plan")
def suite_plan(
    path: SuitePath,
    out: SuiteOut = None,
    gpus: Annotated[
        int | None, _whole(limits.GPUS, "Plan for so many, there or not. Default: as run.", least=0)
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time some steps of trainings that no record tells the pace of.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(help="Estimate for another kind of GPU, such as a100-40gb, from what this one does.")
    ] = None,
    remedies: Annotated[
        bool, typer.Option("--remedies/--no-remedies", help="What would make a deadline hold that does not.")
    ] = True,
) -> None:
    """How long jobs take, where and when each runs, when all are done, and whether the deadline holds."""
    from sameday.suite.jobs import check_writable, open_suite
    from sameday.suite.times.forecast import plan

    opened = open_suite(path, out)
    check_writable(opened.folder)
    plan(opened, gpus, measure, gpu, remedies)


@suite.command("run")
def suite_run(
    path: SuitePath,
    out: SuiteOut = None,
    gpus: Annotated[int | None, _whole(limits.GPUS, "GPUs to use. Default: the suite's, or all.", least=0)] = None,
    again: Annotated[
        list[str], typer.Option(metavar="JOB", help="Do this job anew, and all that wait for it; the old one is kept.")
    ] = [],  # noqa: B006 (typer reads it, nothing changes it)
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit each job to SLURM instead, and leave.")] = False,
    one_job: Annotated[
        bool, typer.Option("--one-job", help="Submit one job to SLURM, in which the whole suite runs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted to SLURM, and submit nothing.")
    ] = False,
) -> None:
    """Run what is missing, here. Exit 0: all done; 1: some failed; 75: stopped, the same command goes on."""
    from sameday.suite.jobs import check_writable, open_suite
    from sameday.suite.page.report import report_at_the_end

    opened = open_suite(path, out)
    if (slurm or one_job or dry_run) and gpus is not None:
        raise BadInput("--gpus is about this machine; the suite says how many GPUs each of its jobs gets from SLURM")
    if dry_run:
        from sameday.suite.running.slurm import dry_run as scripts

        for text in scripts(opened, one_job, again):
            tell(text)
        return
    check_writable(opened.folder)
    if slurm or one_job:
        from sameday.suite.running.slurm import submit

        submit(opened, again, one_job)
        report_at_the_end(opened)
    else:
        from sameday.suite.running.local import run
        from sameday.suite.running.slurm import refuse_queued

        refuse_queued(opened)
        code = run(opened, gpus, again)
        report_at_the_end(opened)
        sys.exit(code)


@suite.command("status")
def suite_status(
    path: SuitePath,
    out: SuiteOut = None,
    live: Annotated[bool, typer.Option("--live", help="Again every two seconds, until all jobs have ended.")] = False,
) -> None:
    """State, step, loss and finish time of each job, and why those that failed did."""
    from sameday.suite.jobs import open_suite
    from sameday.suite.running.status import show

    show(open_suite(path, out), live)


@suite.command("logs")
def suite_logs(
    path: SuitePath,
    job: Annotated[str, typer.Argument(help="Which one.")],
    out: SuiteOut = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """What a job wrote, in all its attempts."""
    from sameday.suite.jobs import open_suite
    from sameday.suite.running.status import logs

    logs(open_suite(path, out), job, follow)


@suite.command("cancel")
def suite_cancel(
    path: SuitePath,
    jobs: Annotated[list[str] | None, typer.Argument(help="Which ones. Default: all that have not ended.")] = None,
    out: SuiteOut = None,
) -> None:
    """Jobs that run save themselves and stop; those that wait are not started. `suite run` takes them up again."""
    from sameday.suite.jobs import open_suite
    from sameday.suite.running.cancel import cancel

    cancel(open_suite(path, out), jobs or ())


@suite.command("watch")
def suite_watch(
    path: SuitePath,
    out: SuiteOut = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Others than 127.0.0.1 can be reached by others.")
    ] = "127.0.0.1",
    port: Annotated[int, _whole(limits.PORTS, "0: any that is free.", least=0)] = 8765,
) -> None:
    """One live page about a suite, for a browser: graph, curves, GPUs, deadline, logs. It only looks."""
    from sameday.suite.page.watch import watch

    watch(path, out, host, port)


@suite.command("report")
def suite_report(
    path: SuitePath,
    out: SuiteOut = None,
    html: Annotated[
        Path | None, typer.Option("--html", "-o", help="The HTML file. Default: report.html in --out.")
    ] = None,
) -> None:
    """One HTML file about all experiments of a suite: curves, metrics with intervals, GPU hours, environments."""
    from sameday.suite.page.report import report_suite

    tell(f"written: {report_suite(path, out, html)}")


class _Command(TyperCommand):
    """Tells all numbers that are too large at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        refuse(ctx.meta.get(TOO_LARGE, ()))
        return rest


class _Lasting(_Command):
    """A command that a closed pipe or a full disk under its log does not end."""

    def invoke(self, ctx: Any) -> Any:
        go_on_without_output()
        return super().invoke(ctx)


ONLY_PRINT = (data, suite_status, suite_logs)
"""Commands that are for nothing but what they print: `| head` ends them."""
for _each in (*app.registered_commands, *suite.registered_commands):
    _each.cls = _Command if _each.callback in ONLY_PRINT else _Lasting


def main() -> None:
    """The whole of a process."""
    in_utf_8()
    guard_streams()
    with finishes():
        run()


def run() -> None:
    """The command that was typed, in this process; SystemExit has its code."""
    try:
        app()
    except BadInput as error:
        tell(f"error: {error}", sys.stderr)
        sys.exit(error.code)
    except RunStopped as stop:
        tell(stop, sys.stderr)
        sys.exit(stop.code)
    except OSError as error:
        from sameday.record.room import AGAIN, no_room, sentence
        from sameday.spec.writing import NotWritten

        if (why := no_room(error)) is None:
            raise
        if isinstance(error, NotWritten):
            path = Path(error.filename)
            tell(sentence(path.name, path.parent, error.size, why, AGAIN), sys.stderr)
        else:
            tell(f"no room: {error}; make room and run again", sys.stderr)
        sys.exit(EXIT_DISK_FULL)
