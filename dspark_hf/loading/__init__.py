"""Finding and loading a target and its drafter. These names stand here because the command line needs them without torch."""

AUTO = "auto"  # in place of a drafter's name: the known one of the target
DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_DRAFTER = "smollm2-135m-instruct-dspark"
