"""The command's tree of sub-commands, and the one place where errors become one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from kronattn.cli import bench, compare, demo, evaluate, explain, export, predict, report, study, tables, theorem, train
from kronattn.cli import list as listing
from kronattn.version import __version__

# ClickException: typer brings its own copy of click from 0.26 on, and re-exports only its leaves.
_UsageError: Any = typer.BadParameter.__mro__[2]

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
) -> None: ...


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
    try:
        code = app(args=list(arguments), prog_name="kronattn", standalone_mode=False)
    except _UsageError as error:
        return _fail(error.format_message(), error.exit_code)
    except typer.Abort:
        return _fail("interrupted", 130)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except ModuleNotFoundError as error:
        return _fail(_naming_the_extra(error), 2)
    except (ValueError, TypeError, OSError) as error:
        return _fail(str(error), 2)
    except RuntimeError as error:
        if not getattr(error, "one_line", False):
            raise
        return _fail(str(error), getattr(error, "exit_code", 1))
    return code if isinstance(code, int) else 0


# Which extra brings a package that a sub-command may find missing.
_EXTRAS = {
    "demo": ("gradio",),
    "export": ("onnx", "onnx_ir", "onnxruntime", "onnxscript"),
    "plots": ("matplotlib",),
    "timm": ("timm",),
    "train": ("jsonargparse", "lightning", "scipy", "sklearn", "tensorboard", "torchmetrics", "yaml"),
    "volumes": ("nibabel",),
    "vision": ("PIL", "safetensors", "torchvision"),
}


def _naming_the_extra(error: ModuleNotFoundError) -> str:
    extra = next((extra for extra, packages in _EXTRAS.items() if error.name in packages), None)
    if extra is None or "pip install" in str(error):
        return str(error)
    return f"this needs {error.name}: pip install 'kronattn[{extra}]'"


def _fail(message: str, code: int) -> int:
    # A command without its sub-command has printed its help instead of a message.
    if message.strip():
        print("kronattn: error: " + " ".join(message.split()), file=sys.stderr)
    return code
