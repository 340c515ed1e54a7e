"""Outputs of a given form: a JSON schema, a regular expression, a grammar or a list of choices.

llguidance (extra `structured`) says after each token which may come next; the engine samples among
those. A guide belongs to one sequence and depends on its tokens alone, so the same request gives
the same tokens in any batch.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import Error, UnsupportedError
from .tokenizer import Tokenizer, check_text

#: What SamplingParams.structured_outputs may hold, one of them.
KINDS = ("json", "json_object", "regex", "choice", "grammar")

# As json.dumps writes it. With white space at will a small model writes nothing else for ever. A
# schema may say otherwise under "x-guidance".
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DATA = ("const", "enum", "default", "examples")  # of a schema, that hold no schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_MAX_COMPILED = 64  # grammars of one engine that are kept
_MAX_WRITTEN = 1 << 20  # characters of a grammar
#: Of a compiled one. An optional property of a JSON schema is 8, a required one 4, and time goes
#: with the square: 2,500 optional ones take 0.4 s (of a Zen 4 core), 10,000 would take 8.
_MAX_SYMBOLS = 20_000
_COMPILERS = 2  # threads, so that small forms pass a large one
#: Of such a thread, only reserved. llguidance recurses along references from rule to rule, up to
#: 13 KB each: 600 of a JSON schema were beyond 8 MiB, and the process was gone.
_STACK_BYTES = 512 << 20


def check(given: Any) -> dict[str, Any] | None:
    """`structured_outputs`, checked and in one form; ValueError, TypeError name what is wrong. What
    only the grammar's compiler can find is the row's error later."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise TypeError(f"structured_outputs={given!r:.100}: a mapping is needed")
    asked = {kind: value for kind, value in given.items() if value is not None}
    if len(asked) != 1 or next(iter(asked)) not in KINDS:
        raise ValueError(
            f"structured_outputs has {', '.join(map(repr, asked)) or 'nothing'}: it must have one "
            f"of {', '.join(KINDS)}"
        )
    kind, value = next(iter(asked.items()))
    name = f"structured_outputs[{kind!r}]"
    if kind == "json":
        value = _schema(name, value)
    elif kind == "json_object":
        if value is not True:
            raise TypeError(f"{name}={value!r:.100}: True is needed")
    elif kind == "choice":
        value = _choices(name, value)
    elif not isinstance(value, str):
        raise TypeError(f"{name}={value!r:.100}: text is needed")
    elif not value:
        raise ValueError(f"{name} is empty")
    if len(written := json.dumps(value)) > _MAX_WRITTEN:
        raise ValueError(f"{name}: {len(written)} characters, at most {_MAX_WRITTEN}")
    try:
        check_text(json.dumps(value, ensure_ascii=False))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return {kind: value}


def _schema(name: str, value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is no JSON: {error}") from None
    if value is True:  # whatever is JSON
        value = {}
    if value is False:
        raise ValueError(f"{name}=False: nothing satisfies this schema")
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r:.100}: a schema (a mapping, or its JSON) is needed")
    try:
        schema = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    for key, bound in _bounds(schema):
        if abs(bound) >= 2**63:
            raise ValueError(f"{name}: {key} is {bound!s:.40}: bounds must be within 64 bits")
    return schema


def _bounds(schema: Any) -> Iterator[tuple[str, float]]:
    """Of numbers: llguidance cuts larger ones to 64 bits and then takes others than were asked for.
    Values of these keys in data ("const", "enum") are none."""
    waiting = [(schema, False)]  # whether keys are names that the user chose
    while waiting:
        found, named = waiting.pop()
        if isinstance(found, list):
            waiting += [(value, False) for value in found]
        elif isinstance(found, dict):
            for key, value in found.items():
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if key in _BOUNDS and is_number and not named:
                    yield key, value
                elif named or key not in _DATA:
                    waiting.append((value, not named and key in _NAMED))


def _choices(name: str, value: Any) -> list[str]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r:.100}: a list of texts is needed")
    choices = list(value)
    for choice in choices:
        if not isinstance(choice, str):
            raise TypeError(f"{name}: {choice!r:.100} is not text")
    if not choices or not all(choices):
        raise ValueError(f"{name} is empty or has an empty choice")
    return list(dict.fromkeys(choices))


class Guide:
    """What one sequence may say next."""

    def __init__(self, matcher: Any, n_vocab: int, alone: Callable[[], Any] | None = None) -> None:
        """alone: a matcher of the same grammar that shares nothing with another sequence's."""
        self._matcher = matcher
        self._n_words = (n_vocab + 31) // 32
        self._alone = alone
        self._tokens: list[int] = []
        self.error: str | None = None

    def mask(self) -> NDArray[np.uint32]:
        """Bit t % 32 of word t // 32: whether token t may come next; [ceil(vocabulary / 32)].

        Where the grammar is satisfied and nothing can follow, the end-of-text tokens."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._is_spent():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        found = np.zeros(self._n_words, np.uint32)
        found[: len(bits)] = bits[: self._n_words]
        self._push_error()
        if self.error is None and not found.any():
            self.error = "no token of the vocabulary continues the structured output"
        return found

    def push(self, token: int) -> None:
        """The token that came. `error` is set if it may not."""
        if self.error is not None:
            return
        taken = self._matcher.consume_token(token)
        if not taken and self._is_spent():
            taken = self._matcher.consume_token(token)
        self._tokens.append(token)
        if not taken:
            self._push_error()
            self.error = self.error or f"token {token} is not allowed here"

    def _is_spent(self) -> bool:
        """Whether the matcher came to the bounds of its lexer, and another one takes its place.

        Copies of a matcher share their lexer, whose bounds (on its states) all sequences use up
        together. What a sequence may say is not to depend on the others: it gets a lexer for
        itself, and what that one says holds."""
        if self._alone is None or "lexer error" not in _reason(self._matcher):
            return False
        self._matcher, self._alone = self._alone(), None
        for token in self._tokens:
            self._matcher.compute_bitmask()  # its work is bounded for each token, too
            self._matcher.consume_token(token)
        return True

    def _push_error(self) -> None:
        if reason := _reason(self._matcher):
            self.error = f"structured output: {reason}"


def _reason(matcher: Any) -> str:
    """Why it failed, without its state, which follows; empty if it did not."""
    if not matcher.is_error():
        return ""
    reason = str(matcher.get_error()).partition("<state>")[0].rstrip()
    if "doesn't satisfy the grammar" in reason:  # the engine samples among what the mask allows
        return "logit_bias and bad_words forbid every token that may come next"
    return "nothing satisfies it" if reason == "NoExtensionBias" else reason


class Guides:
    """Of one engine: its tokenizer in llguidance's form and the grammars compiled so far."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, eos_ids: Sequence[int]) -> None:
        """UnsupportedError without llguidance, without an end-of-text token, and for tokenizers
        that it cannot read."""
        try:
            import llguidance  # noqa: PLC0415 (an extra)
        except ImportError:
            raise UnsupportedError(
                "structured_outputs needs llguidance: pip install 'qkv[structured]'"
            ) from None
        if not eos_ids:
            raise UnsupportedError(
                "structured_outputs: the model names no end-of-text token, which ends an output"
            )
        self._matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(max_grammar_size=_MAX_SYMBOLS)
        self._n_vocab = n_vocab
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._pool = ThreadPoolExecutor(_COMPILERS, "qkv-grammar")
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer.to_json(), n_vocab=n_vocab, eos_token=list(eos_ids)
            )
        except Exception as error:  # whatever its own code raises
            raise UnsupportedError(
                f"structured_outputs: llguidance does not read this tokenizer: {error}"
            ) from error

    def grammar(self, structured: Mapping[str, Any]) -> "Grammar":
        """Of this form, compiled or not."""
        written = json.dumps(structured, sort_keys=True)
        found = self._grammars.get(written)
        if found is None:
            found = Grammar(lambda: self._compile(structured), self._pool, self._n_vocab)
            self._grammars[written] = found
            if len(self._grammars) > _MAX_COMPILED:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(written)
        return found

    def close(self) -> None:
        """What has not begun to compile never will."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, structured: Mapping[str, Any]) -> Any:
        kind, value = next(iter(structured.items()))
        try:
            if kind == "grammar":
                grammar = self._matcher.grammar_from_lark(value)
            elif kind == "regex":
                grammar = self._matcher.grammar_from_regex(value)
            elif kind == "choice":
                # One lexeme: rules for each would be more than the parser takes, from 2,000 on.
                options = " | ".join(json.dumps(choice) for choice in value)
                grammar = self._matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")
            else:
                schema = {"type": "object"} if kind == "json_object" else value
                grammar = self._matcher.grammar_from_json_schema(json.dumps(schema), _JSON_FORM)
            matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        except Exception as error:  # whatever its own code raises
            raise Error(f"structured_outputs[{kind!r}]: {error}") from error
        if reason := _reason(matcher):
            raise Error(f"structured_outputs[{kind!r}]: {reason}")
        return matcher


class Grammar:
    """A form that other threads compile: a large one takes seconds, and rows that do not need it
    are not to wait."""

    def __init__(self, compile: Callable[[], Any], pool: Executor, n_vocab: int) -> None:
        self._compile = compile
        self._pool = pool
        self._n_vocab = n_vocab
        self._found: Future[Any] | None = None

    def _attempt(self) -> Any:
        """A matcher, or why there is none: kept, too, as many rows may have it."""
        try:
            return self._compile()
        except Error as error:
            return str(error)

    def begin(self) -> Future[Any]:
        """A matcher or a text, when it is there."""
        if self._found is None:
            self._found = self._submit(self._attempt)
        return self._found

    def _submit(self, do: Callable[[], Any]) -> Future[Any]:
        """The pool begins its threads when they are needed."""
        before = threading.stack_size(_STACK_BYTES)
        try:
            return self._pool.submit(do)
        finally:
            threading.stack_size(before)

    def guide(self) -> Guide:
        """Of a new sequence; waits. Error if it does not compile."""
        found = self.begin().result()
        if isinstance(found, str):
            raise Error(found)

        def alone() -> Any:
            if self._found is not None and self._found.result() is found:
                self._found = None  # the next sequences begin anew together
            return self._submit(self._compile).result()

        return Guide(found.deep_copy(), self._n_vocab, alone)
