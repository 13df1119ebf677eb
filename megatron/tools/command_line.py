"""What every command line of the suite shares: user errors as single lines, quiet interruptions, progress on stderr."""

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from megatron.cli.layer import group, is_flag, read_layer
from megatron.cli.parser import build_parser
from megatron.cli.provided import typed_number
from megatron.common.environment import rank
from megatron.common.errors import (
    ConfigError,
    ResourceError,
    UserError,
    did_you_mean,
    failure_of_host,
    nearest,
    one_line,
    unusable_path,
)
from megatron.common.files import restrict_new_files
from megatron.common.output_paths import file_problem, folder_problem
from megatron.common.reading import check_regular, unreadable_arguments
from megatron.common.screen import ignore_lost_output
from megatron.config.fields import inside, interval_as_text
from megatron.launch.host_limits import check_working_folder, missing_proc
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec

if TYPE_CHECKING:
    from tqdm import tqdm


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, list) and action.default:
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return action.help if action.default in (None, False, "", []) else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """One paragraph is wrapped; several keep their lines."""
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _StoreOnce(argparse.Action):
    """Stores the values of a flag: a list that is given again gets longer, anything else stays the same.

    Raises ConfigError, which names both values.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, self.default)
        # argparse removes the value of --flag=--; where the default is empty, an empty value is none
        if values == [] and self.nargs in (None, "+") or (values == "" and self.default != ""):
            parser.error(f"{option_string} needs a value")
        if option_string is not None and self.dest in parser.given:
            if self.nargs in ("+", "*"):
                values = [*before, *values]
            elif before != values:
                raise ConfigError(f"{option_string} {before} and {option_string} {values} exclude each other: give one")
        setattr(namespace, self.dest, values)
        parser.given.add(self.dest)


def _hyphened(name: str) -> str:
    """A flag's name with hyphens for underscores."""
    return name.replace("_", "-")


class ToolParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that reports wrong usage as ``ConfigError`` and takes no abbreviated flags.

    A flag may be repeated if it takes a list, which gets longer, or else with the same value. Hyphens and underscores
    in its name are alike, as for training programs.
    """

    def __init__(self, description: str, **settings: Any) -> None:
        super().__init__(description=description, allow_abbrev=False, formatter_class=_HelpFormatter, **settings)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)
        for kind in (int, float):
            self.register("type", kind, partial(typed_number, kind))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, of arguments in UTF-8 only."""
        self.given: set[str] = set()
        words = sys.argv[1:] if args is None else args
        if unreadable := unreadable_arguments(words):
            raise ConfigError(unreadable)
        try:
            return super().parse_known_args(args, namespace)
        except ConfigError as error:
            raise ConfigError([*error.messages, *self._unknown_flags(words)]) from None

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, with suggestions for unknown flags."""
        parsed, rest = self.parse_known_args(args, namespace)
        self.refuse(rest)
        return parsed

    def refuse(self, words: Sequence[str]) -> None:
        """Raises ConfigError for arguments that this parser and its commands do not know."""
        commands = (action.choices for action in self._actions if action.nargs == argparse.PARSER)
        parsers = [self, *(parser for choices in commands for parser in dict(choices or ()).values())]
        ours = [name for parser in parsers for name in parser._option_string_actions]
        if flags := [word.partition("=")[0] for word in words if is_flag(word)]:
            raise ConfigError(_unknown(name, ours) for name in flags)
        if words:
            self.error(f"unrecognized arguments: {' '.join(words)}")

    def _unknown_flags(self, words: Sequence[str]) -> list[str]:
        """A message for each flag that neither this program nor training has: argparse ends at the first mistake.

        No message if a command or another program, such as one named by --program, may have flags of its own.
        """
        has_others = any(action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self._actions)
        if has_others or any(word.endswith(".py") for word in words):
            return []
        ours = set(map(_hyphened, self._option_string_actions))
        names = [name for name, *_ in group(words) if is_flag(name) and _hyphened(name) not in ours]
        return [
            _unknown(name, self._option_string_actions)
            for name in read_layer(group(names), build_parser(GPT2), GPT2).unknown
        ]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = list(map(str, action.choices or ()))
        if value not in (action.choices or (value,)) and (near := nearest(str(value), choices)):
            raise argparse.ArgumentError(action, f"{value!r}: did you mean {near}?")
        super()._check_value(action, value)

    def _parse_optional(self, arg_string: str) -> Any:
        """As argparse's, in which ``--top_k`` finds ``--top-k``, and -5GB is a value.

        What follows a script's name never gets here.
        """
        if arg_string and not is_flag(arg_string):
            return None
        name, equals, value = arg_string.partition("=")
        flag = {_hyphened(known): known for known in self._option_string_actions}.get(_hyphened(name), name)
        return super()._parse_optional(flag + equals + value)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise ConfigError(f"{message} (see --help)")


def _unknown(name: str, flags: Iterable[str]) -> str:
    return f"unknown flag {name}: {did_you_mean(name, flags, otherwise='see --help')}"


def output_file(text: str) -> Path:
    """An argparse type: a file to write. Raises ArgumentTypeError if rank 0, which writes, cannot: before any work."""
    file = Path(text)
    is_replaced = os.path.isfile(file)  # by another of its name: the permissions of its folder decide
    return _output(text, folder_problem(f"{text}:", file.parent) if is_replaced else file_problem("", text))


def output_folder(text: str) -> Path:
    """The same for a folder to write into."""
    return _output(text, folder_problem(f"{text}:", Path(text)))


def _output(text: str, problem: str | None) -> Path:
    if problem and not rank(os.environ):
        raise argparse.ArgumentTypeError(problem.strip())
    return Path(text)


def check_values(args: argparse.Namespace, intervals: Mapping[str, str]) -> None:
    """Raises ConfigError with a line for each value of ``args`` outside its interval, such as ``"[0, 1)"``."""
    problems = [
        f"--{name.replace('_', '-')} {_shown(value)} must be {interval_as_text(interval, value)}"
        for name, interval in intervals.items()
        if (value := getattr(args, name)) is not None and not inside(value, interval)
    ]
    if problems:
        raise ConfigError(problems)


def _shown(value: float) -> str:
    """A number for messages; a whole one may be too large for a float."""
    return f"{value:g}" if isinstance(value, float) or abs(value) < 10**15 else f"of {len(str(abs(value)))} digits"


def run_tool(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and exit: with 0 when it returns, with the error's exit code after a ``UserError``.

    Other users get no access to new files, unless the environment grants it, see ``megatron.common.files``.

    Each message of a ``UserError`` is one line on stderr. After Ctrl-C the exit code is 130, after the reader of
    stdout has closed it 141, without a message, as a shell reports these signals.
    """
    ignore_lost_output(terminals_only=True)
    try:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see megatron.common.ctrl_c
            signal.signal(signal.SIGINT, signal.default_int_handler)
        restrict_new_files(os.environ)
        check_working_folder()
        try:
            main()
        except SystemExit:  # as of --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except UserError as error:
        for message in error.messages:
            _print_error(message)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _discard(sys.stdout)
        sys.exit(141)
    except Exception as error:
        if (problem := unusable_path(error)) is not None:
            _print_error(problem)
            sys.exit(ConfigError.exit_code)
        if (limit := failure_of_host(error) or missing_proc()) is None:
            raise
        with suppress(OSError):
            sys.stdout.flush()
        _discard(sys.stdout)
        _print_error(limit)
        sys.exit(ResourceError.exit_code)
    sys.exit(0)


def _discard(stream: TextIO) -> None:
    """Give the interpreter, which flushes ``stream`` once more on its way out, somewhere to write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(message: str) -> None:
    """Print an error after what stdout has, as far as both can still be written."""
    with suppress(OSError):
        sys.stdout.flush()
    try:
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    except OSError:  # the exit code says it still
        _discard(sys.stderr)


def print_warnings(messages: Iterable[str]) -> None:
    """Print warnings of the program on stderr, one a line."""
    for message in messages:
        print(f"{Path(sys.argv[0]).name}: warning: {one_line(message)}", file=sys.stderr)


def read_architecture(program: Path) -> ArchitectureSpec:
    """``ARCHITECTURE`` of an entry script, whose main part is not run.

    Raises:
        ConfigError: The script cannot be loaded, or defines none.
    """
    folder = str(program.resolve().parent)
    sys.path.insert(0, folder)  # as if it were started
    try:
        check_regular(program)
        contents = runpy.run_path(str(program), run_name="program")
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--program {program} cannot be loaded ({type(error).__name__}: {error})") from error
    if isinstance(architecture := contents.get("ARCHITECTURE"), ArchitectureSpec):
        return architecture
    raise ConfigError(
        f"--program {program} defines no ARCHITECTURE, the list of layers of its model, which this needs: name an "
        "entry script such as pretrain_gpt2.py"
    )


_SECONDS = 30.0
"""Between two lines."""
_LINE = "> {desc}{n_fmt} of {total_fmt}{unit} in {elapsed}, {rate_fmt}{postfix}"


class _Lines:
    """Writes each state that tqdm draws as a line on stderr."""

    def write(self, text: str) -> None:
        """Write the line in ``text``, if there is one."""
        if line := text.strip("\r\n "):
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        """Flush stderr."""
        sys.stderr.flush()


def progress_bar(
    iterable: Iterable | None = None, *, shown: bool = True, after: float = 10.0, **options: Any
) -> "tqdm":
    """tqdm's bar, with its ``options``, where stderr is a terminal; otherwise a line each half minute and at the end.

    Nothing is printed if ``shown`` is False, as on other ranks than the first, nor outside of terminals by a job that
    takes less than ``after`` seconds.
    """
    from tqdm import tqdm

    if sys.stderr.isatty():
        return tqdm(iterable, disable=not shown, **options)
    options["desc"] = f"{options['desc']}: " if "desc" in options else ""
    options |= {"unit": options.get("unit", "")}
    options |= {
        "mininterval": _SECONDS,
        "maxinterval": _SECONDS,
        "miniters": 1,
        "delay": after or 1e-9,
    }  # with none tqdm also writes the beginning
    return tqdm(iterable, disable=not shown, file=_Lines(), bar_format=_LINE, **options)
