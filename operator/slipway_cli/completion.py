"""Completion in a shell: verbs, options, and the names of services and replicas of the cluster.

kubectl runs `kubectl_complete-slipway` with the words after `kubectl slipway`, the last one incomplete, and reads one
candidate a line and then a directive of cobra. `kubectl-slipway completion bash|zsh` prints a script that does the same
for the command `kubectl-slipway`.
"""

import sys
from collections.abc import Sequence
from typing import Any, Final

import typer

from slipway_api import names
from slipway_cli.cluster import Cluster

FILES, NO_FILES = ":0", ":4"  # cobra's ShellCompDirective: complete file names, or not

SCRIPTS: Final = {
    "bash": """_kubectl_slipway() {
  local IFS=$'\\n'
  local words=("${COMP_WORDS[@]:1:COMP_CWORD}")
  COMPREPLY=($(compgen -W "$(kubectl_complete-slipway "${words[@]}" 2>/dev/null | grep -v '^:' | cut -f1)" \\
    -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _kubectl_slipway kubectl-slipway
""",
    "zsh": """#compdef kubectl-slipway
_kubectl_slipway() {
  local -a found
  found=(${(f)"$(kubectl_complete-slipway "${(@)words[2,CURRENT]}" 2>/dev/null | grep -v '^:' | cut -f1)"})
  if (( ${#found} )); then compadd -a found; else _files; fi
}
compdef _kubectl_slipway kubectl-slipway
""",
}

CHOICES: Final = {"output": ("table", "json"), "shell": tuple(SCRIPTS)}  # by parameter


def complete(app: typer.Typer, words: Sequence[str]) -> tuple[list[str], str]:
    """The candidates for the last of these words, and whether file names fit too."""
    group: Any = typer.main.get_command(app)
    *before, incomplete = words or ("",)
    values, left = _read_options(group, before)
    if not left:
        command, place = group, None
    else:
        command = group.commands.get(left[0])
        if command is None:
            return [], NO_FILES
        own, arguments = _read_options(command, left[1:])
        values, place = values | own, len(arguments)
    if before and (option := _option(command, before[-1])) is not None and _takes_value(option):
        found, directive = _values_of(option)
    elif incomplete.startswith("-"):
        found, directive = _options(command), NO_FILES
    elif place is None:
        found, directive = {name: verb.get_short_help_str(80) for name, verb in group.commands.items()}, NO_FILES
    else:
        arguments_of = [one for one in command.params if one.param_type_name == "argument"]
        argument = arguments_of[place] if place < len(arguments_of) else None
        found, directive = _arguments(argument, left, values)
    lines = [f"{name}\t{text}" if text else name for name, text in found.items() if name.startswith(incomplete)]
    return lines, directive


def _read_options(command: Any, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The values of the command's options in these words, and the words from its first argument on."""
    values: dict[str, str] = {}
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        name, _, value = word.partition("=")
        option = _option(command, name)
        if option is not None and _takes_value(option):
            values[option.name] = value or next(rest, "")
        elif option is None and not word.startswith("-"):
            left.append(word)
            if hasattr(command, "commands"):  # a verb: its options are its own
                return values, [*left, *rest]
    return values, left


def _option(command: Any, word: str) -> Any:
    return next((one for one in command.params if word.startswith("-") and word in one.opts), None)


def _takes_value(option: Any) -> bool:
    return not (option.is_flag or option.count)


def _options(command: Any) -> dict[str, str]:
    options = [one for one in command.params if one.param_type_name == "option"]
    return {max(one.opts, key=len): (one.help or "") for one in options} | {"--help": "Show the options."}


def _values_of(option: Any) -> tuple[dict[str, str], str]:
    if option.name in CHOICES:
        return dict.fromkeys(CHOICES[option.name], ""), NO_FILES
    return {}, FILES if option.name in ("manifest", "filename", "kubeconfig", "trace") else NO_FILES


def _arguments(argument: Any, left: Sequence[str], values: dict[str, str]) -> tuple[dict[str, str], str]:
    """The names of services or replicas. Without a cluster there are none: completion prints no errors."""
    if argument is None or argument.name not in ("name", "pod"):
        return _values_of(argument) if argument is not None and argument.name in CHOICES else ({}, FILES)
    Cluster.kubeconfig = values.get("kubeconfig") or None
    try:
        cluster = Cluster(values.get("namespace", ""), values.get("context", ""))
        if argument.name == "pod":
            found = [pod["metadata"] for pod in cluster.pods(left[1])]
        else:
            found = [one["metadata"] for one in cluster.objects("InferenceService")]
        return {one["name"]: one.get("labels", {}).get(names.LABEL_REVISION, "") for one in found}, NO_FILES
    except Exception:  # noqa: BLE001  whatever the API server answers, a sentence here would stand in the user's line
        return {}, NO_FILES


def main() -> None:
    """The command `kubectl_complete-slipway`."""
    from slipway_cli.main import app

    lines, directive = complete(app, sys.argv[1:])
    print("\n".join([*lines, directive]))
