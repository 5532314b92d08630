"""One table of options, many uses: a dataclass whose fields carry what argparse, the environment, `--help`
and the README's table need to know. An option is declared once, with `option()`; all else is derived."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from app.values import Parse, did_you_mean


class UsageError(Exception):
    """What the person at the keyboard wrote can't be taken; the message says what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    name: str  # the dataclass field
    flag: str
    group: str
    help: str
    parse: Parse  # raises ValueError with what is allowed
    metavar: str
    default: str  # in words
    repeatable: bool  # its values are tuples, and add up
    secret: bool  # its value is never shown
    switch: bool  # on by being there, without a value
    positional: bool  # its value may stand alone, without the flag
    known_as: tuple[str, ...]  # what other servers call it

    def env(self, prefix: str) -> str:
        return prefix + self.flag.removeprefix("--").replace("-", "_").upper()


def option(
    default: Any = dataclasses.MISSING,
    *,
    group: str,
    help: str,
    parse: Parse,
    metavar: str,
    shown: str | None = None,
    flag: str | None = None,
    repeatable: bool = False,
    secret: bool = False,
    switch: bool = False,
    positional: bool = False,
    known_as: tuple[str, ...] = (),
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """A dataclass field that is also an option. `shown` is the default in words, if it isn't the value."""
    about = {
        "flag": flag,
        "group": group,
        "help": help,
        "parse": parse,
        "metavar": metavar,
        "default": str(default) if shown is None else shown,
        "repeatable": repeatable,
        "secret": secret,
        "switch": switch,
        "positional": positional,
        "known_as": known_as,
    }
    made: Any = dataclasses.field(
        default=default, default_factory=default_factory, repr=not secret, metadata={"option": about}
    )
    return made


def options_of(cls: type) -> tuple[Option, ...]:
    """The options of a dataclass, in the order in which its fields are written."""
    found = []
    for field in dataclasses.fields(cls):
        about = dict(field.metadata["option"])
        flag = about.pop("flag") or "--" + field.name.replace("_", "-")
        found.append(Option(name=field.name, flag=flag, **about))
    return tuple(found)


# reading the command line and the environment


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")


@dataclass(frozen=True, slots=True)
class Given:
    """Values that somebody wrote, and where: `{"port": 80}` and `{"port": "PLIMSOLL_PORT=80"}`."""

    values: dict[str, Any]
    written: dict[str, str]


def build_parser(
    prog: str, options: Sequence[Option], *, description: str, epilog: str, env_prefix: str | None
) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--option VALUE …]",
        description=description,
        epilog=epilog,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}
    for each in options:
        group = groups.setdefault(each.group, None) or parser.add_argument_group(each.group)
        groups[each.group] = group
        env = f"; {each.env(env_prefix)}" if env_prefix else ""
        shown = f"{each.help} [{each.default}{env}]".replace("%", "%%")
        how: dict[str, Any] = {"action": "append", "metavar": each.metavar}
        if each.switch:
            how = {"action": "append_const", "const": "yes"}
        group.add_argument(each.flag, dest=each.name, help=shown, **how)
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6, width=100)


def read_flags(parser: argparse.ArgumentParser, options: Sequence[Option], argv: Sequence[str]) -> Given:
    """Raises UsageError for what is unknown, malformed, or given twice."""
    found, unknown = parser.parse_known_args(argv)
    alone = [] if any(word.startswith("-") for word in unknown) else unknown
    if unknown and not (alone and any(each.positional for each in options)):
        wrong = next((word for word in unknown if word.startswith("-")), unknown[0])
        raise UsageError(_explain_unknown(parser.prog, wrong, options))
    given = Given({}, {})
    for each in options:
        raw: list[str] = getattr(found, each.name, [])
        if each.positional:
            raw = [*raw, *alone]
        if len(raw) > 1 and not each.repeatable:
            shown = "" if each.secret else f" ({', '.join(raw)})"
            raise UsageError(f"{each.flag} is given {len(raw)} times{shown}; write it once.")
        for value in raw:
            _put(given, each, value, where=each.flag, written=f"{each.flag} {value}")
    return given


def read_environment(options: Sequence[Option], environ: Mapping[str, str], prefix: str) -> Given:
    """Empty values count as unset. Raises UsageError for a `PLIMSOLL_…` that is no option, or malformed."""
    by_env = {each.env(prefix): each for each in options}
    given = Given({}, {})
    for name in sorted(environ):
        value = environ[name]
        if not name.startswith(prefix) or not value or _is_service_link(name, value, prefix):
            continue
        if name not in by_env:
            raise UsageError(
                f"unknown environment variable {name}{did_you_mean(name, by_env)} Unset it, or see "
                "`plimsoll serve --help` for the names."
            )
        _put(given, by_env[name], value, where=name, written=f"{name}={value}")
    return given


def _put(given: Given, option: Option, raw: str, *, where: str, written: str) -> None:
    try:
        value = option.parse(raw)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if option.repeatable:
        value = (*given.values.get(option.name, ()), *value)
    given.values[option.name] = value
    given.written[option.name] = where if option.secret else written


def _is_service_link(name: str, value: str, prefix: str) -> bool:
    """Kubernetes tells every pod of a Service named `plimsoll`, or `plimsoll-…`, about it:
    PLIMSOLL_PORT=tcp://10.0.0.1:8000, PLIMSOLL_SERVICE_HOST, PLIMSOLL_BLUE_PORT_8000_TCP_ADDR … None of them
    is meant for us."""
    rest = "_" + name.removeprefix(prefix)
    if re.search(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)", rest):
        return True
    return rest.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", value) is not None


def _explain_unknown(prog: str, word: str, options: Sequence[Option]) -> str:
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected {word!r}; every value has an option before it. See `{prog} --help`."
    for each in options:
        if flag in each.known_as:
            return f"unknown option {flag}; here it is called {each.flag}: {each.help}"
    guess = did_you_mean(flag, [each.flag for each in options])
    return f"unknown option {flag}{guess} See `{prog} --help`."


def markdown_table(options: Sequence[Option], *, env_prefix: str) -> str:
    """The README's table of options."""
    lines = ["| option | environment | default | |", "|---|---|---|---|"]
    for each in options:
        cells = (
            f"`{each.flag} {each.metavar}`",
            f"`{each.env(env_prefix)}`",
            each.default,
            each.help,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
