"""Where the `dspark-hf` command comes in: beside the package, whose import would load torch before `--help` is shown.

The package sees this module and leaves its registering to the command (`dspark_hf.register`, called as the work begins).
"""


def main() -> None:
    from dspark_hf.cli import main

    main()
