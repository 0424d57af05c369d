"""`satrap completion`: a script with which a shell completes the commands of `satrap`, their options, and the choices
of an option. Anything else is completed as a file. Written from the parsers, so it needs no other package; zsh runs the
script of bash.
"""

import argparse
from collections.abc import Iterator

from satrap.cli.options import Commands

_SCRIPT = """_satrap() {
  local word="${COMP_WORDS[COMP_CWORD]}" words="" line="" i
  for ((i = 1; i < COMP_CWORD; i++)); do line="$line${COMP_WORDS[i]} "; done
  COMPREPLY=()
  case "$line" in
    *" -- "*) return ;;  # arguments of a script
CASES
  esac
  [ -z "$word" ] && [ "${words#--}" != "$words" ] && return  # a file, unless an option is begun
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _satrap satrap
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_completion(commands: Commands) -> None:
    """Add the command."""
    completion = commands.add_parser(
        "completion",
        help="print the script with which a shell completes commands and options",
        description="Print the script with which a shell completes the commands and options of satrap. To load it in "
        'each new shell, add to ~/.bashrc: eval "$(satrap completion bash)"; or to ~/.zshrc: '
        'eval "$(satrap completion zsh)".',
    )
    completion.add_argument("shell", choices=["bash", "zsh"], help="the shell")


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script. parser: the parser of the command line."""
    cases = [f'    {pattern}) words="{" ".join(words)}" ;;' for pattern, words in _cases("", parser)]
    return (_ZSH if shell == "zsh" else "") + _SCRIPT.replace("CASES", "\n".join(cases)).rstrip()


def _cases(typed: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Yield patterns of what was typed before a word, and the words that may follow; the longer patterns first."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    for action in shown:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action._name_parser_map.items():
                yield from _cases(f"{typed}{name} ", command)
            yield f'"{typed}"', [*action._name_parser_map, *_options(shown)]
            return
    for action in shown:
        if action.choices is not None and action.option_strings:
            yield f'"{typed}"*"{action.option_strings[0]} "', [str(choice) for choice in action.choices]
    positional = [str(choice) for action in shown if not action.option_strings for choice in action.choices or ()]
    yield f'"{typed}"*', [*positional, *_options(shown)]


def _options(actions: list[argparse.Action]) -> list[str]:
    return [option for action in actions for option in action.option_strings if option.startswith("--")]
