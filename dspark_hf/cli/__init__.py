"""The `dspark-hf` command: each sub-command parses, calls one function of the package and prints.

Exit codes: 0 done, 1 the doctor found a fault, 2 bad input or nothing answered, 130 interrupted.
What needs torch is imported inside the commands, so that help and usage errors come at once.
"""

from __future__ import annotations

import os
import sys

import typer
from rich.text import Text

# Registers the commands, in the order of the help text.
from . import drafter_commands, generate_command, measure_commands, train_command  # noqa: F401
from .app import app, err


def main() -> None:
    """Entry point: user errors become one line and exit code 2."""
    try:
        code = app(standalone_mode=False)  # typer hands an early exit's code back, 130 for Ctrl-C
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it ends
        sys.exit(0)
    except (ValueError, OSError) as error:
        err.print(Text.assemble(("Error:", "red"), " ", " ".join(str(error).split())), soft_wrap=True)
        sys.exit(2)
    except Exception as error:
        if not hasattr(error, "show"):  # click's usage errors print themselves
            raise
        error.show()
        sys.exit(2)
    if code == 130:
        err.print("Interrupted. What was finished is kept.")
    sys.exit(code or 0)
