"""Requests through the engine: a bounded number of them at a time, each with its output."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..outputs import RequestOutput
from ..params import SamplingParams
from ..run import Hook
from . import keys
from .prompt import Prompts, Request, Rows
from .source import open_source

if TYPE_CHECKING:
    from ..engine import Engine
    from ..progress import Progress


#: Rows that a hook's finish() sees together.
_HOOK_ROWS = 256


def through(
    engine: Engine,
    requests: Iterable[Request],
    params: SamplingParams,
    *,
    on_finish: Hook | None = None,
    progress: Progress | bool = False,
) -> Generator[tuple[Request, RequestOutput], None, None]:
    """Each request with its output, as they finish. If the hook has a finish(), it is called for
    some hundred rows at a time, before these are given out."""
    under_way: dict[int, Request] = {}

    def prompts() -> Iterator[Any]:
        for index, request in enumerate(requests):
            under_way[index] = request
            yield request.prompt

    def hooked(output: RequestOutput) -> Mapping[str, Any] | None:
        """A hook is to see the row's place in the input, not that among the rows to be done."""
        assert on_finish is not None
        index, output.index = output.index, under_way[output.index].place
        try:
            return on_finish(output)
        finally:
            output.index = index

    # The engine does not see a finish(): it would call it once, at the end.
    hook = None if on_finish is None else hooked
    finish = getattr(on_finish, "finish", None)
    outputs = engine.stream(prompts(), params, on_finish=hook, progress=progress)
    held: list[tuple[Request, RequestOutput]] = []
    for output in outputs:
        request = under_way.pop(output.index)
        output.index = request.place
        held.append((request, output))
        if finish is None or len(held) >= _HOOK_ROWS:
            yield from _finished(held, finish, engine)
    yield from _finished(held, finish, engine)


def _finished(
    held: list[tuple[Request, RequestOutput]], finish: Any, engine: Engine
) -> Iterator[tuple[Request, RequestOutput]]:
    if finish is not None and held:
        finish(engine)
    yield from held
    held.clear()


def answers(
    engine: Engine,
    rows: Iterable[Any],
    options: Rows | None = None,
    params: SamplingParams | None = None,
    *,
    on_finish: Hook | None = None,
    first: int = 0,
) -> Iterator[dict[str, Any]]:
    """Rows in, rows with answers out (prompt.py lists their columns), as they finish; no files.

    rows: mappings, or what else open_source() takes. first: the place of the first row, which is
    the id of a row that has none of its own."""
    params = SamplingParams() if params is None else params
    prompts = Prompts(Rows() if options is None else options, params)
    prompts.check(engine)
    for request, output in through(
        engine, requests(prompts, rows, first), params, on_finish=on_finish
    ):
        yield prompts.answer(request, output)


def requests(prompts: Prompts, rows: Iterable[Any], first: int = 0) -> Iterator[Request]:
    """Of all rows, those with an id that was used before as an error."""
    known = keys.Index()
    for place, row in enumerate(prompts.begin(open_source(rows).rows()), first):
        request = prompts.identify(row, place)
        while known.get(request.id_key) is not None:
            request = prompts.duplicate(request)
        known.put(request.id_key, keys.SEEN, 0)
        prompts.complete(request)
        yield request
