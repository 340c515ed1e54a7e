"""Requests through the engine: a bounded number of them at a time, each with its output."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..outputs import RequestOutput
from ..params import SamplingParams
from ..run import Hook
from .keys import Index
from .prompt import Prompts, Request, Rows
from .source import open_source

if TYPE_CHECKING:
    from ..engine import Engine
    from ..progress import Progress


def through(
    engine: Engine,
    requests: Iterable[Request],
    params: SamplingParams,
    *,
    on_finish: Hook | None = None,
    progress: Progress | bool = False,
) -> Generator[tuple[Request, RequestOutput], None, None]:
    """Each request with its output, as they finish. A hook's finish() is not called: outputs are
    handed out before it could fill them in (the caller may, on the outputs that it still has)."""
    under_way: dict[int, Request] = {}

    def prompts() -> Iterator[Any]:
        for index, request in enumerate(requests):
            under_way[index] = request
            yield request.prompt

    hook = None if on_finish is None else (lambda output: on_finish(output))
    for output in engine.stream(prompts(), params, on_finish=hook, progress=progress):
        yield under_way.pop(output.index), output


def answers(
    engine: Engine,
    rows: Iterable[Mapping[str, Any]],
    options: Rows | None = None,
    params: SamplingParams | None = None,
    *,
    on_finish: Hook | None = None,
    first: int = 0,
) -> Iterator[dict[str, Any]]:
    """Rows in, rows with answers out (prompt.py lists their columns), as they finish; no files.

    rows: mappings, or what else open_source() takes. first: the place of the first row, which is
    the id of a row that has none of its own. Of a hook that has finish(), as
    hooks.reference_logprob() has, nothing is written: score such rows afterwards."""
    params = SamplingParams() if params is None else params
    prompts = Prompts(Rows() if options is None else options, params)
    requests = _requests(prompts, open_source(rows).rows(), first)
    for request, output in through(engine, requests, params, on_finish=on_finish):
        yield prompts.answer(request, output)


def _requests(prompts: Prompts, rows: Iterable[Any], first: int) -> Iterator[Request]:
    known = Index()
    for place, row in enumerate(rows, first):
        request = prompts.identify(row, place)
        if known.get(request.id_key) is not None:
            request = prompts.duplicate(request, place)
        known.put(request.id_key, 1, 0)
        prompts.complete(request)
        yield request
