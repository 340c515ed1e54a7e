"""lm-evaluation-harness (0.4.10 or newer) on this engine, as its model `qkv`:

    lm_eval --model qkv --model_args pretrained=PATH,kv_cache_dtype=fp8_e4m3 --tasks gsm8k

The harness finds the model where qkv is installed as a wheel (qkv_lm_eval_hook.py). The command
`qkv-lm-eval` is the harness's own with the model registered, however qkv was installed; and in a
program importing this module registers it for `lm_eval.simple_evaluate(model="qkv", ...)`.

Neither torch nor transformers is needed. Texts become tokens, contexts are cut and long texts fall
into windows as in the harness's `hf` model; all requests of a kind go to the engine at once, which
batches them.
"""

import importlib
import inspect
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import models
from .._core import Checkpoint, Error
from ..engine import Engine
from ..params import SamplingParams, integer

try:
    import lm_eval.models  # noqa: F401  its own models first: it looks for them in an empty list
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        f"lm-evaluation-harness cannot be imported ({error}); this brings it: "
        "pip install 'qkv[eval]'"
    ) from error

_log = logging.getLogger("qkv")

# What bounds the output; the first that is there counts.
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Arguments that the harness passes to every model and that mean nothing here.
_NOT_USED = ("batch_size", "max_batch_size", "trust_remote_code")

Tokens = list[int]
Encoded = tuple[Any, Tokens, Tokens]  # the request's own arguments or None, context, continuation


@register_model("qkv")
class QkvLM(TemplateLM):
    """pretrained: what Engine takes as model. max_length: tokens that the model sees at most
    (default: all its positions but one). max_gen_toks: tokens to generate where a task does not
    say. add_bos_token: True or False overrules the tokenizer. prefix_token_id: what an empty
    context is replaced by (default: BOS, else EOS). enable_thinking, chat_template_args: for the
    chat template. All other arguments are Engine's."""

    def __init__(
        self,
        pretrained: str | os.PathLike[str],
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_options(options)
        self._max_gen_toks = integer("max_gen_toks", max_gen_toks, 1)
        self._add_bos = add_bos_token
        self._template_options = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_options["enable_thinking"] = enable_thinking
        self._template: str | None = None
        if max_length is not None:
            # A token that is predicted takes a position although the model never sees it.
            wanted = integer("max_length", max_length, 1)
            options["max_model_len"] = min(wanted + 1, _positions(pretrained))
        self.engine = Engine(pretrained, **options)
        self.max_length: int = self.engine.info["max_model_len"] - 1
        given = options.get("tokenizer")
        self._name = os.fspath(given if isinstance(given, (str, os.PathLike)) else pretrained)
        self.tokenizer = self.engine.tokenizer
        found = (prefix_token_id, self.tokenizer.bos_id, self.tokenizer.eos_id)
        known = [token for token in found if token is not None]
        self._prefix = known[0] if known else None
        self._prefix_text = self.tokenizer.decode(known[:1], skip_special_tokens=False)

    # What the harness asks about the model.

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is None:
            raise ValueError("the tokenizer names neither BOS nor EOS: give prefix_token_id=")
        return self._prefix

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Goes into the harness's results, under "config"."""
        return {"qkv": self.engine.info}

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> Tokens:
        if add_special_tokens is None:
            # A chat template has written BOS itself.
            written = bool(self._prefix_text) and string.startswith(self._prefix_text)
            add_special_tokens = not written and self._add_bos is not False
        ids = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        bos = self.tokenizer.bos_id
        if add_special_tokens and self._add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text: the default one for True, else the one of that name, which is then
        the one in use."""
        if not chat_template:
            return None
        name = "default" if chat_template is True else chat_template
        if name != "default" and name not in self.tokenizer.templates:
            known = ", ".join(self.tokenizer.templates) or "none"
            raise ValueError(f"chat template {name!r}: the model has {known}")
        self._template = self.tokenizer.templates.get(name)
        return self._template or ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Without add_generation_prompt the last message is left open, to be continued."""
        options = {**self._template_options, "add_generation_prompt": add_generation_prompt}
        if self._template is not None:
            options["chat_template"] = self._template
        try:
            text = self.tokenizer.apply_chat_template(chat_history, **options)
        except Error as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            _log.warning("without the system message, for which there is this error: %s", error)
            text = self.tokenizer.apply_chat_template(rest, **options)
        return text if add_generation_prompt else _left_open(text, chat_history[-1]["content"])

    # Running. TemplateLM.loglikelihood makes tokens of its requests and calls the first of these.

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        contexts, continuations, n_cut = [], [], 0
        for _, context, continuation in requests:
            room = self.max_length + 1 - len(continuation)
            if room < 1:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens, max_length is {self.max_length}"
                )
            n_cut += len(context) > room
            contexts.append(context[-room:])
            continuations.append(continuation)
        self._tell_cut(n_cut, len(requests))
        scores = self.engine.score(contexts, continuations, progress=not disable_tqdm)
        answers = [(score.total, score.greedy) for score in scores]
        for (given, _, _), score, answer in zip(requests, scores, answers, strict=True):
            if given is not None and score.error is None:
                self.cache_hook.add_partial("loglikelihood", given, answer)
        _raise_errors([score.error for score in scores])
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        windows: list[Encoded] = []
        owners: list[int] = []
        for place, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, predicted in map(make_disjoint_window, pairs):
                windows.append((None, context, predicted))
                owners.append(place)
        totals = [0.0] * len(requests)
        answers = self._loglikelihood_tokens(windows, disable_tqdm)
        for place, (total, _) in zip(owners, answers, strict=True):
            totals[place] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        rows, params, n_cut = [], [], 0
        times: Counter[str] = Counter()
        for request in requests:
            context, given = request.args
            asked = self.sampling_params(given)
            room = self.max_length - asked.max_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={asked.max_tokens}: must be below max_length={self.max_length}"
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            n_cut += len(ids) > room
            # Repeats of a prompt are to differ where they are sampled: by their key.
            key = None if asked.greedy else f"repeat {times[context]}"
            times[context] += 1
            rows.append({"prompt_token_ids": ids[-room:], "key": key})
            params.append(asked)
        self._tell_cut(n_cut, len(requests))

        def keep(output: Any) -> None:
            args = requests[output.index].args
            self.cache_hook.add_partial("generate_until", args, output.text)

        outputs = self.engine.generate(rows, params, on_finish=keep, progress=not disable_tqdm)
        _raise_errors([output.error or output.scores.get("error") for output in outputs])
        return [output.text for output in outputs]

    def sampling_params(self, given: Mapping[str, Any]) -> SamplingParams:
        """A task's generation_kwargs; ValueError for one that has no meaning here. Greedy unless
        do_sample is true, or is not said and temperature is above 0."""
        values = dict(given)
        stops = [
            stop
            for name in ("until", "stop")
            for stop in _as_list(name, values.pop(name, None))
            if stop != ""  # the harness's own models pass over it
        ]
        bounds = [values.pop(name, None) for name in _MAX_TOKENS]
        bounds = [bound for bound in bounds if bound is not None]
        sample = values.pop("do_sample", None)
        temperature = values.pop("temperature", None)
        if sample is None:
            sample = temperature is not None and temperature > 0
        if values.pop("num_beams", 1) != 1:
            raise ValueError("num_beams: there is no beam search here, only 1 is possible")
        return SamplingParams.from_mapping(
            {
                **values,
                "max_tokens": bounds[0] if bounds else self._max_gen_toks,
                "temperature": (1.0 if temperature is None else temperature) if sample else 0.0,
                "stop": stops,
                "stop_token_ids": [*values.get("stop_token_ids", ()), *self._special(stops)],
            }
        )

    def _special(self, stops: Iterable[str]) -> Tokens:
        """Stop strings that are special tokens: the text does not show those."""
        encoded = [self.tokenizer.encode(stop, add_special_tokens=False) for stop in stops]
        ids = [row[0] for row in encoded if len(row) == 1]
        return [token for token in ids if token in self.tokenizer.special_ids]

    def _tell_cut(self, n_cut: int, n_rows: int) -> None:
        if n_cut:
            _log.warning(
                "%d of %d contexts are cut on the left to fit into max_length=%d",
                n_cut,
                n_rows,
                self.max_length,
            )


def _check_options(options: dict[str, Any]) -> None:
    """Takes out of them what is not for the engine; ValueError for what nobody knows."""
    for name in _NOT_USED:
        options.pop(name, None)
    if str(options.get("device")).startswith("cuda"):
        # Its command says "cuda:0" where nothing was said, and `hf` runs on the CPU all the same.
        _log.warning("device=%r: there is no CUDA here, the CPU is used", options.pop("device"))
    known = [name for name in inspect.signature(Engine).parameters if name != "model"]
    known[known.index("max_model_len")] = "max_length"
    own = [name for name in inspect.signature(QkvLM).parameters if name not in ("self", "options")]
    for name in options:
        if name not in known:
            every = ", ".join(dict.fromkeys([*own, *known]))
            raise ValueError(f"unknown model argument {name!r}; known: {every}")
    lanes = options.get("kv_cache_dtype")
    if isinstance(lanes, (list, tuple)) and len(lanes) != 1:
        raise ValueError(
            f"kv_cache_dtype={lanes!r}: one format for each run (qkv compare does several at once)"
        )


def _positions(model: str | os.PathLike[str]) -> int:
    checkpoint = Checkpoint(models.resolve(model))
    try:
        return int(checkpoint.model_config()["max_positions"])
    finally:
        checkpoint.close()


def _as_list(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name}={value!r}: a string or a list of strings is needed")
    return list(value)


def _left_open(text: str, content: str) -> str:
    """The conversation up to the end of its last message's content, as transformers'
    continue_final_message cuts it: white space at the end stays where the template keeps it."""
    place = text.rfind(content.strip())
    if place < 0:
        raise Error(f"the chat template does not show the message to continue: {content!r:.100}")
    whole, bare = content.lstrip(), content.strip()
    return text[: place + len(whole if text.startswith(whole, place) else bare)]


def _raise_errors(errors: Sequence[str | None]) -> None:
    """The harness has no rows with errors: they would count as wrong answers."""
    failed = [(place, error) for place, error in enumerate(errors) if error is not None]
    if failed:
        place, error = failed[0]
        raise Error(f"{len(failed)} of {len(errors)} requests failed; request {place}: {error}")


def main() -> None:
    """The console script: the harness's own command line with this model in its list."""
    importlib.import_module("lm_eval.__main__").cli_evaluate()
