"""What a comparison is asked to do, checked before a model is loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from .. import _core, digests, kv_scales, models, options
from ..engine import Engine
from ..params import flag, integer
from ..quantization import METHODS
from ..tasks import Task
from ..tasks import task as named_task
from ..tasks.needle import LENGTHS, MAX_TOKENS, needle
from ..tokenizer import load_tokenizer
from .results import Lane

Say = Callable[[str], None]  # to the user, a line

#: The format whose rounding is drawn at random: the control lane's.
CONTROL_FORMAT = "bf16_stochastic"
CONTROL = "control"
RERUN_ITEMS = 32

#: Engine options that results depend on; the others (threads, sizes) may change when a comparison
#: is taken up again.
_DECISIVE = (
    "quantization", "prefill_quantization", "quantization_param_path", "fp8_gemm_backend",
    "fp4_gemm_backend", "activation_quant", "compute_dtype", "query_dtype", "device",
    "max_model_len",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A task and how much of it."""

    task: Task
    limit: int | None
    chat: bool

    def described(self) -> dict[str, Any]:
        task = self.task
        return {
            "task": task.name,
            "kind": task.kind,
            "limit": self.limit,
            "size": len(task),
            "asked": len(task) if self.limit is None else min(self.limit, len(task)),
            "chance": task.chance,
            "max_tokens": task.max_tokens,
            "chat": self.chat,
            "digest": self._digest(),
        }

    def _digest(self) -> str:
        """Of what is asked: the text, or prompts, right answers and stops of the items."""
        digest = hashlib.blake2b(digest_size=12)
        if self.task.kind == "text":
            digest.update(self.task.text().encode("utf-8", "surrogatepass"))
        else:
            for item in self.task.items(self.limit, chat=self.chat):
                asked = (item.key, item.prompt, item.reference, item.choices, item.stop)
                digest.update(repr(asked).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


@dataclass(frozen=True)
class ModelLanes:
    """A model and the lanes that run over its weights, in the order of the engine's."""

    model: str  # as given
    path: str
    label: str  # short and unique
    kv: tuple[Any, ...]  # what Engine(kv_cache_dtype=...) takes
    lanes: tuple[Lane, ...]
    formats: tuple[options.Lane, ...]  # of each of the lanes
    config: Mapping[str, Any]  # Checkpoint.model_config()
    digest: str


@dataclass(frozen=True)
class Plan:
    """All that is to be run."""

    models: tuple[ModelLanes, ...]
    tasks: tuple[Asked, ...]
    margin: float
    rerun_items: int
    speed: bool = True
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(lane for entry in self.models for lane in entry.lanes)

    def header(self) -> dict[str, Any]:
        """What goes into the journal's first line, and must be the same to go on with it."""
        settings: dict[str, Any] = {
            "models": [entry.model for entry in self.models],
            "tasks": [asked.described() for asked in self.tasks],
            "margin": self.margin,
            "rerun_items": self.rerun_items,
        }
        for name in _DECISIVE:
            if self.engine_options.get(name) is not None:
                settings[name] = self.engine_options[name]
        if "quantization_param_path" in settings:
            path = settings["quantization_param_path"] = os.fspath(
                settings["quantization_param_path"]
            )
            settings["quantization_param_digest"] = digests.of_files([Path(path)])
        prefill = settings.get("prefill_quantization")
        if prefill is not None and prefill not in METHODS:
            settings["prefill_quantization"] = os.fspath(prefill)
            settings["prefill_quantization_digest"] = digests.of_path(models.resolve(prefill))
        return {
            "settings": settings,
            "environment": digests.environment(
                {entry.label: entry.digest for entry in self.models}
            ),
            "lanes": [asdict(lane) for lane in self.lanes],
        }


def plan(
    models_: Any,
    kv_cache_dtypes: Sequence[Any],
    tasks: Any,
    *,
    limit: int | Mapping[str, int] | None,
    margin: float,
    control: bool,
    grid: bool,
    chat: bool,
    rerun_items: int,
    engine_options: Mapping[str, Any],
    speed: bool = True,
) -> Plan:
    """Checks everything that can be checked without weights. ValueError, TypeError, Error."""
    if "kv_cache_dtype" in engine_options or "tokenizer" in engine_options:
        raise TypeError("compare: kv_cache_dtypes says the lanes; a tokenizer is the model's own")
    unknown = sorted(set(engine_options) - (set(signature(Engine).parameters) - {"model"}))
    if unknown:
        raise TypeError(f"compare: there is no option {unknown[0]!r}")
    flag("control", control)
    flag("grid", grid)
    flag("chat", chat)
    flag("speed", speed)
    integer("rerun_items", rerun_items, 0)
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 1e-6 <= margin < 1:
        raise ValueError(f"margin={margin!r}: a share of the items, in [0.000001, 1)")
    given = [models_] if isinstance(models_, (str, os.PathLike)) else list(models_)
    if not given:
        raise ValueError("compare: no model")
    dtypes = (
        [kv_cache_dtypes] if isinstance(kv_cache_dtypes, (str, Mapping)) else list(kv_cache_dtypes)
    )
    if not dtypes:
        raise ValueError("kv_cache_dtypes: at least one is needed")
    if not grid and len(dtypes) not in (1, len(given)):
        raise ValueError(
            f"grid=False: {len(given)} models and {len(dtypes)} KV formats; one format for each "
            "model is needed"
        )
    names = _labels([os.fspath(model) for model in given])
    entries = []
    for place, (model, label) in enumerate(zip(given, names, strict=True)):
        own = dtypes if grid or len(dtypes) == 1 else [dtypes[place]]
        entries.append(
            _model_lanes(
                os.fspath(model),
                label,
                own,
                control=control and place == 0,
                several=len(given) > 1,
                compute_dtype=engine_options.get("compute_dtype", "bf16"),
            )
        )
    if sum(not lane.control for entry in entries for lane in entry.lanes) < 2:
        raise ValueError("compare: one lane alone has nothing to be compared with")
    return Plan(
        models=tuple(entries),
        tasks=_asked(tasks, limit, chat, entries, engine_options),
        margin=float(margin),
        rerun_items=rerun_items,
        speed=speed,
        engine_options=dict(engine_options),
    )


def _labels(paths: Sequence[str]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    if len(set(paths)) < len(paths):
        raise ValueError(f"compare: a model is given twice: {', '.join(paths)}")
    parts = [Path(path).parts or (path,) for path in paths]
    for n in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-n:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return list(paths)


def _model_lanes(
    model: str, label: str, dtypes: Sequence[Any], *, control: bool, several: bool,
    compute_dtype: str,
) -> ModelLanes:  # fmt: skip
    path = models.resolve(model)
    checkpoint = _core.Checkpoint(path)
    try:
        config = checkpoint.model_config()
        gguf = checkpoint.container == "gguf"
        declared = "" if gguf else kv_scales.declared(checkpoint.folder)[0]
        digest = digests.of_model(checkpoint)
    finally:
        checkpoint.close()
    kv = [*dtypes, {"default": CONTROL_FORMAT, "name": CONTROL}] if control else [*dtypes]
    found = options.lanes(
        kv, int(config["n_layers"]), compute_dtype=compute_dtype, declared=declared
    )
    lanes = []
    for place, (lane, given) in enumerate(zip(found, kv, strict=True)):
        is_control = control and place == len(kv) - 1
        lanes.append(
            Lane(
                name=f"{label} / {lane.name}" if several else lane.name,
                model=label,
                kv_cache_dtype=CONTROL_FORMAT if is_control else given,
                kv_name=CONTROL_FORMAT if is_control else lane.name,
                control=is_control,
                bytes_per_token=options.token_bytes(config, [lane]),
            )
        )
    return ModelLanes(model, path, label, tuple(kv), tuple(lanes), tuple(found), config, digest)


def _asked(
    tasks: Any,
    limit: Any,
    chat: bool,
    entries: Sequence[ModelLanes],
    engine_options: Mapping[str, Any],
) -> tuple[Asked, ...]:
    given = [tasks] if isinstance(tasks, (str, Task)) else list(tasks)
    if not given:
        raise ValueError("compare: no task")
    found: dict[str, Asked] = {}
    for entry in given:
        task = entry
        if entry == "needle":
            task = _needle(entries, engine_options)
        elif isinstance(entry, str):
            task = named_task(entry)
        if not isinstance(task, Task):
            raise TypeError(f"tasks: {entry!r:.60}: a name or a qkv.tasks.Task")
        if task.name in found:
            raise ValueError(f"tasks: {task.name} is there twice")
        own = limit.get(task.name) if isinstance(limit, Mapping) else limit
        if own is not None:
            integer(f"limit of {task.name}", own, 1)
        found[task.name] = Asked(task, own, chat)
    if isinstance(limit, Mapping):
        unknown = sorted(set(limit) - set(found))
        if unknown:
            raise ValueError(f"limit: no task is called {', '.join(map(repr, unknown))}")
    return tuple(found.values())


def _needle(entries: Sequence[ModelLanes], engine_options: Mapping[str, Any]) -> Task:
    """Of the lengths that every model takes, in tokens of the first one."""
    bounds = [int(entry.config["max_positions"]) for entry in entries]
    bounds += [engine_options[name] for name in ("max_model_len", "kv_tokens")
               if engine_options.get(name) is not None]  # fmt: skip
    most = min(bounds) - MAX_TOKENS
    lengths = [length for length in LENGTHS if length <= most]
    if not lengths:
        raise ValueError(f"tasks: needle: its shortest text does not fit into {min(bounds)} tokens")
    encode = load_tokenizer(entries[0].path).encode
    return needle(lengths=lengths, encode=encode)
