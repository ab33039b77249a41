"""The command's tree of sub-commands, and the one place where errors become one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from kronattn.cli import bench, compare, demo, evaluate, explain, export, predict, report, study, tables, theorem, train
from kronattn.cli import list as listing
from kronattn.cli.memory import keep_freed_memory
from kronattn.cli.threads import Busy, take_threads
from kronattn.extras import extra_of
from kronattn.version import __version__

# Begins to watch here, while everything else is imported.
_busy = Busy()
_asked: set[str] = set()

# ClickException: typer brings its own copy of click from 0.26 on, and re-exports only its leaves.
_UsageError: Any = typer.BadParameter.__mro__[2]

# As a shell has it after Ctrl-C.
_INTERRUPTED = 130

app = typer.Typer(
    name="kronattn",
    help="Kronecker attention: the paper's tables and theorem recomputed, benchmarks, networks and their training.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kronattn {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", "-V", callback=_print_version, is_eager=True, help="Print it."),
    threads: int | None = typer.Option(
        None,
        min=1,
        help="Of the CPU to compute with, before or after the sub-command. Default: the cores that are free.",
    ),
) -> None:
    # Asking for help computes nothing.
    if not {"-h", "--help"} & _asked:
        take_threads(threads, _busy)
        keep_freed_memory()


app.command("train", context_settings=train.CONTEXT)(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("compare", context_settings=train.CONTEXT)(compare.compare)
app.command("study")(study.study)
app.command("theorem")(theorem.theorem)
app.command("report")(report.report)
app.command("predict")(predict.predict)
app.command("explain")(explain.explain)
app.command("export")(export.export)
app.command("demo")(demo.demo)
app.add_typer(listing.app, name="list")
app.add_typer(tables.app, name="tables")
app.add_typer(bench.app, name="bench")


def run(arguments: Sequence[str]) -> int:
    """Run one command line. What a user got wrong is one line on standard error and exit code 2."""
    arguments = _threads_first(arguments)
    _asked.clear()
    _asked.update(arguments)
    try:
        code = app(args=arguments, prog_name="kronattn", standalone_mode=False)
    except _UsageError as error:
        return _fail(error.format_message(), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", _INTERRUPTED)
    except ModuleNotFoundError as error:
        return _fail(_naming_the_extra(error), 2)
    except (ValueError, TypeError, OSError) as error:
        return _fail(str(error), 2)
    except RuntimeError as error:
        if not getattr(error, "one_line", False):
            raise
        return _fail(str(error), getattr(error, "exit_code", 1))
    if code == _INTERRUPTED:
        # So says typer, from 0.29 on, in the place of the exception.
        return _fail("interrupted", code)
    return code if isinstance(code, int) else 0


def _threads_first(arguments: Sequence[str]) -> list[str]:
    """An option of all sub-commands, wherever it stands.

    >>> _threads_first(["train", "--config", "digits", "--threads", "2"])
    ['--threads', '2', 'train', '--config', 'digits']
    """
    first, rest = [], list(arguments)
    for index, argument in enumerate(rest):
        if argument == "--threads" or argument.startswith("--threads="):
            width = 1 if "=" in argument else 2
            first, rest = rest[index : index + width], rest[:index] + rest[index + width :]
            break
    return [*first, *rest]


def _naming_the_extra(error: ModuleNotFoundError) -> str:
    extra = extra_of(error.name)
    if extra is None or "pip install" in str(error):
        return str(error)
    return f"this needs {error.name}: pip install 'kronattn[{extra}]'"


def _fail(message: str, code: int) -> int:
    # A command without its sub-command has printed its help instead of a message.
    if message.strip():
        print("kronattn: error: " + " ".join(message.split()), file=sys.stderr)
    return code
