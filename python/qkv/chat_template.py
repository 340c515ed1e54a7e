"""Chat templates: Jinja2 in a sandbox, with the helpers that the hub's templates expect."""

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import StrictUndefined, Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ._core import Error

_MAX_REPEATED = 1 << 20


class _Generation(Extension):
    """{% generation %} marks the assistant's part for training; here it only passes through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt must not have.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Environment(ImmutableSandboxedEnvironment):
    """Without the operations by which a few characters make gigabytes. A template may still be
    slow: that is Python code between two characters, which Ctrl-C ends."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, Sequence) and isinstance(count, int):
                    _check_length(len(text) * count)
        elif isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)


def _check_length(length: int) -> None:
    if length > _MAX_REPEATED:
        raise SecurityError(f"a value of {length} elements, at most {_MAX_REPEATED} are allowed")


def _environment(**options: Any) -> _Environment:
    environment = _Environment(extensions=[_Generation, loopcontrols], **options)
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise, "strftime_now": _now}
    environment.globals.update(helpers)
    environment.globals.pop("lipsum", None)  # text without end
    return environment


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    return _environment(trim_blocks=True, lstrip_blocks=True).from_string(source)


def row_template(source: str) -> Callable[[Mapping[str, Any]], str]:
    """A template of the caller's over the columns of a row. Nothing is trimmed, and a column that
    the row does not have is an error. Error for a template that is none, and for each row that it
    cannot be filled in for."""
    try:
        compiled = _environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(
            source
        )
    except TemplateError as error:
        raise Error(f"template: {error}") from error

    def fill(columns: Mapping[str, Any]) -> str:
        with _errors_as("template"):
            return compiled.render(columns)

    return fill


@contextmanager
def _errors_as(what: str) -> Iterator[None]:
    try:
        yield
    except TemplateError as error:
        raise Error(f"{what}: {error}") from error
    except Exception as error:  # the template is a program: it may divide by zero or never return
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise Error(f"{what}: {reason}") from error


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation as a list of dicts, each with a role; ValueError says which is not."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError("a conversation is a list of {'role': ..., 'content': ...} mappings")
    if not messages:
        raise ValueError("the conversation is empty")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {place} has no 'role': {message!r:.200}")
    return [dict(message) for message in messages]


def render(source: str, messages: Any, tokens: Mapping[str, str], **options: Any) -> str:
    """The prompt text. `tokens`: bos_token, eos_token and so on."""
    checked = check_messages(messages)
    with _errors_as("chat template"):
        return _compile(source).render(messages=checked, **tokens, **options)
