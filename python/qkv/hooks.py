"""Ready-made hooks: what `on_finish` of generate(), chat(), stream() and compare() can be.

    gold = {"q1": "Paris", "q2": "Lima"}
    rows = [{"key": "q1", "prompt": "The capital of France is"}, ...]
    for output in engine.generate(rows, on_finish=qkv.hooks.exact_match(gold)):
        print(output.key, output.scores["exact_match"])

A hook takes an output and returns a mapping, which becomes output.scores. References are a mapping
by output.key, or a list by output.index, the place in the input; compare() hands out its rows in
parts and needs a mapping by the items' keys, {q.key: q.gold for q in task.questions}. A row without
a reference has its reason in scores["error"], as it has any exception of a hook.

With several lanes a hook sees the first lane's text; per_lane() has it see each lane's. With
several samples it sees the first one's.

A hook may have a method finish(engine), called once after the last row of a run: time for what
needs the engine itself, as reference_logprob() does. What finish() raises is raised by the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .outputs import RequestOutput, Score
from .run import Hook, described
from .tasks.extraction import as_number, last_number

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["choice", "combine", "exact_match", "numeric", "per_lane", "reference_logprob"]

Tokens = Sequence[int] | NDArray[np.integer[Any]]
Scores = dict[str, Any]
_T = TypeVar("_T")
_R = TypeVar("_R")


def exact_match(
    references: Mapping[Any, str] | Sequence[str], *, normal: Callable[[str], str] = str.strip
) -> Hook:
    """Whether the text is the reference, after both went through `normal`: {"exact_match": bool}.

    hooks.exact_match(["Paris", "Lima"], normal=lambda text: text.strip(" .\\n").lower())
    """
    find = _references(references, normal)
    return lambda output: {"exact_match": normal(output.text) == find(output)}


def numeric(references: Mapping[Any, str | float] | Sequence[str | float]) -> Hook:
    """Whether the last number in the text has the reference's value: {"numeric": bool, "number":
    the number as it was written, None if there is none}. Numbers are found as the tasks' flexible
    extraction does it. Of a reference that is a text the last number counts, too, so that GSM8K's
    worked answers will do. By value: "18.00", "$18" and "18." are 18.

    hooks.numeric({"a": 18, "b": "#### 1,200"})
    """
    find = _references(references, _value)

    def hook(output: RequestOutput) -> Scores:
        wanted, number = find(output), last_number(output.text)
        right = number is not None and as_number(number) == wanted
        return {"numeric": right, "number": number}

    return hook


def _value(reference: str | float) -> Decimal:
    text = str(reference)
    value = as_number(text)
    if value is None:
        value = as_number(last_number(text) or "")
    if value is None or isinstance(reference, bool):
        raise ValueError("there is no number in it")
    return value


def choice(
    references: Mapping[Any, str | int] | Sequence[str | int], letters: str = "ABCD"
) -> Hook:
    """Whether the text chooses the reference, one of `letters` or its place among them:
    {"choice": bool, "letter": the one chosen, None if there is none}.

    The letter is the one after the first "answer is" or "answer:", else the first that stands alone
    before punctuation or at the end of a line: "B", "(B) since ...", "The answer is **B**"; the
    article in "A robe" is none.

    hooks.choice({"q1": "B", "q2": 0}, letters="ABCDEFGHIJ")
    """
    if not isinstance(letters, str) or not letters or len(set(letters)) != len(letters):
        raise ValueError(f"letters {letters!r}: different letters are needed")
    one = f"([{re.escape(letters)}])"
    said = re.compile(rf"(?i:answer)(?i:\s+is)?\s*:?\s*[*_(\[]*{one}(?!\w)")
    alone = re.compile(rf"(?<!\w){one}(?=[).:,;\]*]|\s*$)", re.MULTILINE)

    def letter(reference: str | int) -> str:
        if isinstance(reference, str) and len(reference) == 1 and reference in letters:
            return reference
        if isinstance(reference, str) or isinstance(reference, bool):
            raise ValueError(f"it is not one of {letters}")
        if not 0 <= reference < len(letters):
            raise ValueError(f"there are {len(letters)} letters, counted from 0")
        return letters[reference]

    find = _references(references, letter)

    def hook(output: RequestOutput) -> Scores:
        wanted = find(output)
        match = said.search(output.text) or alone.search(output.text)
        chosen = match.group(1) if match else None
        return {"choice": chosen == wanted, "letter": chosen}

    return hook


def reference_logprob(
    references: Mapping[Any, str | Tokens] | Sequence[str | Tokens],
) -> _ReferenceLogprob:
    """The log-probability of a reference after the prompt, instead of what was generated:
    {"reference_logprob": in nats, of all its tokens together, "reference_tokens": how many,
    "reference_greedy": whether each of them is the most likely one}.

    References are texts, with the space that they begin with, or token ids. After a prompt that was
    a text they are tokenized together with it, as score() does; after token ids and a chat
    template, and in compare(), a text is tokenized by itself.

    They are scored after the last row, all in one batch: generate() and chat() return when that is
    done, and stream() fills in the outputs that it gave out before when it ends. compare() does it
    part by part. Of an endless stream score now and then what has come so far with
    `hook.finish(engine)`.

    With lanes output.scores has the first lane's, and in "lanes" each lane's by name; so have the
    scores of output.lanes. It needs no per_lane().

    hooks.reference_logprob({"q1": " Paris"})
    """
    return _ReferenceLogprob(references)


class _ReferenceLogprob:
    def __init__(self, references: Any) -> None:
        self._find = _references(references, _text_or_tokens)
        self._waiting: list[tuple[RequestOutput, Any]] = []

    def __call__(self, output: RequestOutput) -> Scores:
        self._waiting.append((output, self._find(output)))
        return {}

    def finish(self, engine: Engine) -> None:
        """Scores the rows that came since the last time."""
        waiting = list(self._waiting)
        if not waiting:
            return
        prompts = [_prompt(engine, output, reference) for output, reference in waiting]
        references = [reference for _, reference in waiting]
        found = engine.score(prompts, references, progress=False)
        del self._waiting[: len(waiting)]  # not before: an interrupt loses none
        for (output, _), score in zip(waiting, found, strict=True):
            _merge(output.scores, _of_score(score))
            common = [name for name in output.lanes if name in score.lanes]
            lanes = {name: _of_score(score.lanes[name]) for name in common}
            for name in common:
                _merge(output.lanes[name].scores, lanes[name])
            if lanes:
                _merge(output.scores, {"lanes": lanes})


def _text_or_tokens(reference: Any) -> Any:
    if len(reference) == 0:
        raise ValueError("it is empty")
    return reference


def _prompt(engine: Engine, output: RequestOutput, reference: Any) -> Any:
    """The text where that is what the tokens are of: it and the reference are tokenized together
    then. A template's text has its special tokens in it and is another thing."""
    if output.prompt is not None and isinstance(reference, str):
        if engine.tokenizer.encode(output.prompt) == output.prompt_token_ids.tolist():
            return output.prompt
    return output.prompt_token_ids


def _of_score(score: Score) -> Scores:
    if score.error is not None:
        return {"error": score.error}
    return {
        "reference_logprob": score.total,
        "reference_tokens": len(score.token_logprobs),
        "reference_greedy": score.greedy,
    }


def per_lane(hook: Hook) -> Hook:
    """The hook on each lane's output: {"lanes": {name: its scores}}, which also become the scores
    of output.lanes. An exception marks its lane alone. Without lanes it is the hook itself.

    engine.generate(rows, on_finish=hooks.per_lane(hooks.numeric(gold)))
    """
    if hasattr(hook, "finish"):
        raise TypeError("per_lane: a hook with finish() sees to the lanes itself")

    def each(output: RequestOutput) -> Mapping[str, Any] | None:
        if not output.lanes:
            return hook(output)
        found = {name: _guarded(hook, lane) for name, lane in output.lanes.items()}
        for name, lane in output.lanes.items():
            _merge(lane.scores, found[name])
        return {"lanes": found}

    return each


def combine(*hooks: Hook) -> Hook:
    """All of them, their scores together. An exception in one is the row's error and leaves the
    scores of the others; two that give a score of the same name are an error.

    hooks.combine(hooks.per_lane(hooks.numeric(gold)), hooks.reference_logprob(texts))
    """
    for hook in hooks:
        if not callable(hook):
            raise TypeError(f"combine: {hook!r:.100} is not a hook")
    return _Combined(hooks)


class _Combined:
    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks
        if any(hasattr(hook, "finish") for hook in hooks):
            self.finish = self._finish

    def __call__(self, output: RequestOutput) -> Scores:
        found: Scores = {}
        for hook in self._hooks:
            _merge(found, _guarded(hook, output))
        return found

    def _finish(self, engine: Engine) -> None:
        for hook in self._hooks:
            if hasattr(hook, "finish"):
                hook.finish(engine)


def _guarded(hook: Hook, output: RequestOutput) -> Scores:
    try:
        return dict(hook(output) or {})
    except Exception as error:
        return {"error": described(error)}


def _merge(scores: Scores, more: Mapping[str, Any]) -> None:
    """Adds scores, lane by lane and error by error; ValueError if one is there already."""
    for name, value in more.items():
        if name == "lanes":
            lanes = scores.setdefault("lanes", {})
            for lane, own in value.items():
                _merge(lanes.setdefault(lane, {}), own)
        elif name == "error" and name in scores:
            scores[name] = f"{scores[name]}; {value}"
        elif name in scores:
            raise ValueError(f"two hooks give the score {name!r}")
        else:
            scores[name] = value


def _references(given: Any, convert: Callable[[_T], _R]) -> Callable[[RequestOutput], _R]:
    """Finds an output's reference. All are converted beforehand: ValueError names a bad one."""
    pairs: list[tuple[Any, _T]]
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        pairs = list(enumerate(given))
    else:
        raise TypeError(f"references={given!r:.100}: a mapping by key or a list is needed")
    by_key = isinstance(given, Mapping)
    known: dict[Any, _R] = {}
    for key, reference in pairs:
        try:
            known[key] = convert(reference)
        except (TypeError, ValueError) as error:
            raise ValueError(f"references[{key!r}]={reference!r:.100}: {error}") from None

    def find(output: RequestOutput) -> _R:
        key = output.key if by_key else output.index
        if key not in known:
            raise ValueError(f"no reference for the {'key' if by_key else 'index'} {key!r}")
        return known[key]

    return find
