"""What is compared: weight formats times KV formats, each with its pool and its cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import planner
from ..options import PAGE_TOKENS, check_quantization
from ..params import integer, real
from ..planner import GIB, Source
from .simulate import LEAST_RUNS, CostModel, Machine


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A weight format (None: as stored) and a KV format, as Engine takes them."""

    name: str
    quantization: str | None
    kv_cache_dtype: Any
    kv: str  # the format's name


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A choice with what a simulation needs of it."""

    choice: Choice
    pool_tokens: int
    kv_bytes: int  # of a token
    window: int  # the largest of a layer, 0: none has one
    cost: CostModel


def _listed(name: str, given: Any) -> list[Any]:
    if given is None or isinstance(given, (str, Mapping)):
        return [given]
    if not isinstance(given, Sequence):
        raise TypeError(f"{name}={given!r:.60}: a list of formats is needed")
    if not given:
        raise ValueError(f"{name} is empty: at least one is needed")
    return list(given)


def choices(kv_cache_dtypes: Any, quantizations: Any, model: Source) -> list[Choice]:
    """All pairs. The name says of a pair what differs between them."""
    kinds = _listed("quantizations", quantizations)
    if not all(kind is None or isinstance(kind, str) for kind in kinds):
        raise TypeError(f"quantizations={kinds!r:.60}: names, or None for the weights as stored")
    for kind in kinds:
        check_quantization(kind, None)
    given = _listed("kv_cache_dtypes", kv_cache_dtypes)
    names = list(planner.kv_bytes(given, model.shape))
    if len(names) < len(given):
        raise ValueError(f"kv_cache_dtypes={given!r:.60}: one is there twice")
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"quantizations={kinds!r:.60}: one is there twice")
    found = []
    for kind in kinds:
        for name, dtype in zip(names, given, strict=True):
            title = name if len(kinds) == 1 else f"{kind or 'as stored'} + {name}"
            found.append(Choice(name=title, quantization=kind, kv_cache_dtype=dtype, kv=name))
    return found


def pools(pool_tokens: Any, choice: Choice) -> list[int] | None:
    """The sizes given for a choice: a number, several, or a mapping from its name or KV format to
    these. None: no size was given."""
    given = pool_tokens
    if isinstance(given, Mapping):
        given = given.get(choice.name, given.get(choice.kv))
        if given is None:
            raise ValueError(f"pool_tokens={pool_tokens!r:.60}: nothing for {choice.name}")
    if given is None:
        return None
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    if not several:
        raise ValueError("pool_tokens is empty: at least one size is needed")
    return [integer("pool_tokens", n, PAGE_TOKENS, 2**35 - 16) for n in several]


def _weight_bytes(choice: Choice, machine: Machine, model: Source) -> float:
    given = machine.weights_gib
    kind = choice.quantization
    if isinstance(given, Mapping):
        given = given.get(kind or "none")
    if given is not None:
        n_gib = real("weights_gib", given)
        if n_gib < 0.0:
            raise ValueError(f"weights_gib={n_gib:g}: must not be negative")
        return n_gib * GIB
    if kind is None and model.n_bytes:
        return model.n_bytes
    if model.config is None:
        raise ValueError(
            f"{choice.name}: the size of these weights cannot be told, give weights_gib"
        )
    return planner.weight_bytes(model.config, kind)


def _cost(choice: Choice, machine: Machine, model: Source, weight_bytes: float) -> CostModel:
    cost = machine.cost
    if isinstance(cost, Mapping):
        if choice.name not in cost:
            there = f"only for {', '.join(cost)}" if cost else "nor for anything else"
            raise ValueError(
                f"cost: nothing for {choice.name}, {there}; a bench fits one where a format ran "
                f"{LEAST_RUNS} times"
            )
        cost = cost[choice.name]
    if cost is not None:
        return cost
    if model.config is None:
        raise ValueError(
            "the operations of a token cannot be counted in a GGUF file: give cost, or the "
            "model's config.json"
        )
    assert machine.gb_per_s is not None and machine.tflops is not None  # Machine has checked
    return CostModel.roofline(
        weight_bytes=weight_bytes,
        row_weights=planner.row_weights(model.config),
        gb_per_s=machine.gb_per_s,
        tflops=machine.tflops,
    )


def arms(
    choice: Choice, pool_tokens: Any, machine: Machine, model: Source, users: int
) -> list[Arm]:
    """Of a choice on a machine: one for each size of the pool, as given or else as planned, for up
    to so many users."""
    weight_bytes = _weight_bytes(choice, machine, model)
    (kv_bytes,) = planner.kv_bytes([choice.kv_cache_dtype], model.shape).values()
    sizes = pools(pool_tokens, choice)
    if sizes is None:
        if machine.memory_gib is None:
            raise ValueError("how large is the pool? Give memory_gib or pool_tokens")
        planner.check_memory(machine.memory_gib, weight_bytes / GIB, machine.mem_fraction)
        room = planner.room_gib(machine.memory_gib, weight_bytes / GIB, machine.mem_fraction)
        sizes = [planner.pool_tokens(choice.kv_cache_dtype, model.shape, room * GIB, users)]
    cost = _cost(choice, machine, model, weight_bytes)
    return [
        Arm(choice=choice, pool_tokens=n, kv_bytes=kv_bytes, window=model.shape.window, cost=cost)
        for n in sizes
    ]
