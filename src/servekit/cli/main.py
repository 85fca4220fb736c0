"""The command line: one typer app, and the single place where an error becomes an exit code.

Command modules import only typer at their top, so that `servekit --help` loads neither torch nor transformers.
"""

import os
import sys

import typer
from typer.exceptions import TyperException

from servekit import __version__
from servekit.cli import bench, cost, kv, models, pull, serve
from servekit.errors import ConfigError, EngineError, ServekitError

app = typer.Typer(
    name="servekit",
    help="A local LLM server with its own engine, and the tools to plan and measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("kv")(kv.kv)
app.add_typer(bench.app, name="bench")
app.command("cost")(cost.cost)
app.command("pull")(pull.pull)
app.add_typer(models.app, name="models")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"servekit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """A local LLM server with its own engine, and the tools to plan and measure it."""


def main() -> None:
    """Run the command line and exit: 0 success, 1 negative result, 2 user's error, 3 invalid measurement, 70 ours."""
    sys.exit(run(sys.argv[1:]))


def run(args: list[str]) -> int:
    """Run one command and return its exit code. SERVEKIT_DEBUG=1 lets tracebacks through."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe with a narrow encoding must not turn a model's text into a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        result = app(args=args, prog_name="servekit", standalone_mode=False)
    except ServekitError as error:
        _report(error)
        return error.exit_code
    except TyperException as error:
        if message := error.format_message():  # a bare `servekit` has printed its help and has nothing to add
            known = {command.name for command in app.registered_commands}
            known |= {group.name for group in app.registered_groups}
            command = f" {args[0]}" if args[0] in known else ""
            _report(ConfigError(message, hint=f"see `servekit{command} --help`"))
        return ConfigError.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our stdout has gone (`servekit models | head -1`); nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if os.environ.get("SERVEKIT_DEBUG"):
            raise
        _report(EngineError(f"{type(error).__name__}: {error}", hint="SERVEKIT_DEBUG=1 shows where it happened"))
        return EngineError.exit_code
    return result if isinstance(result, int) else 0


def _report(error: ServekitError) -> None:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    main()
