"""Which modules a configuration means: ignore lists, targets, globs, regular expressions."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from .. import _core
from .section import Section

#: Projections that some files, and some configurations, hold as one.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}

Match = Callable[[str], str | None]  # a module's name -> the pattern that means it


def with_text_part(match: Match) -> Match:
    """The same by the names that the text part's modules have inside of a multimodal model."""

    def either(module: str) -> str | None:
        found = match(module)
        if found is None:
            found = match(f"language_model.{module}")
        if found is None and module.startswith("model."):
            found = match(f"model.language_model.{module.removeprefix('model.')}")
        return found

    return either


# What a pattern is made of once escapes and classes are letters: `x`, quantifiers, groups.
_LETTERS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUP = re.compile(r"\((?:\?[:=!>]|\?<[=!]|\?P?<\w+>)?([^()]*)\)([*+{]?)")
_MOST_REPEATS, _LONGEST = 6, 4096


def compile_pattern(section: Section, pattern: str) -> "re.Pattern[str]":
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise section.fail(f"{pattern!r:.80} is no regular expression: {error}") from error
    if _may_hang(pattern):
        raise section.refuse(
            f"{pattern!r:.80}: it is over {_LONGEST} characters, repeats what repeats or chooses, "
            f"or repeats over {_MOST_REPEATS} times, and could take for ever: name the modules"
        )
    return compiled


def _may_hang(pattern: str) -> bool:
    """Whether a name could take exponential time: Python's `re` tries all ways to share it out."""
    if len(pattern) > _LONGEST:
        return True
    left = _LETTERS.sub("x", pattern)
    n_repeats = len(re.findall(r"[*+{]", left))
    while (group := _GROUP.search(left)) is not None:
        many = re.search(r"[*+{?|]", group[1]) is not None
        if many and group[2]:
            return True
        left = f"{left[: group.start()]}{'x?' if many else 'x'}{group[2]}{left[group.end() :]}"
    return n_repeats > _MOST_REPEATS or left.count("?") > 2 * _MOST_REPEATS


def parents(module: str) -> Iterator[str]:
    """The name, and those of the modules that it lies in."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def by_path(patterns: Iterable[str]) -> Match:
    """FP8's lists: dotted paths, with or without "model.", and a name alone at the end of a path.
    `mlp.gate` never means `mlp.gate_up_proj`."""
    listed = {_bare(pattern): pattern for pattern in patterns}

    def match(module: str) -> str | None:
        whole = _bare(module)
        for path in parents(whole):
            if path in listed:
                return listed[path]
        parts = whole.split(".")
        for start in range(1, len(parts)):
            for end in range(start + 1, len(parts) + 1):
                if ".".join(parts[start:end]) in listed:
                    return listed[".".join(parts[start:end])]
        return None

    return match


def by_substring(patterns: Iterable[str]) -> Match:
    """AWQ's and bitsandbytes' lists."""
    listed = tuple(patterns)
    return lambda module: next((p for p in listed if p and p in module), None)


def by_glob(patterns: Iterable[str]) -> Match:
    """ModelOpt's, Quark's and gpt-oss' lists: a glob means the name, a module that it lies in, or
    any dotted part."""
    listed = [(p, re.compile(fnmatch.translate(p))) for p in patterns]

    def match(module: str) -> str | None:
        candidates = [*parents(module), *module.split(".")]
        for pattern, regex in listed:
            if any(regex.match(name) for name in candidates):
                return pattern
        return None

    return match


def by_target(section: Section, patterns: Iterable[str]) -> Match:
    """compressed-tensors' ignore list: `re:` at the start of the name, an exact name, or the end of
    a dotted path. Never a parent: lists name those, too, and do not mean what lies in them."""
    exact = {p for p in patterns if not p.startswith("re:")}
    regexes = [(p, compile_pattern(section, p[3:])) for p in patterns if p.startswith("re:")]

    def match(module: str) -> str | None:
        parts = module.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in exact:
                return ".".join(parts[start:])
        return next((p for p, regex in regexes if regex.match(module)), None)

    return match


def with_fused(match: Match, fused: Mapping[str, tuple[str, ...]] = FUSED) -> Match:
    """The same with fused projections: one that a file holds whole is meant if all its shards are,
    and a shard if the whole is."""
    match = with_text_part(match)

    def whole_or_shards(module: str) -> str | None:
        found = match(module)
        if found is not None:
            return found
        parent, dot, last = module.rpartition(".")
        if last in fused:
            return _all_shards(match, module, [f"{parent}{dot}{shard}" for shard in fused[last]])
        for whole, shards in fused.items():
            if last in shards:
                return match(f"{parent}{dot}{whole}")
        return None

    return whole_or_shards


def _all_shards(match: Match, module: str, shards: list[str]) -> str | None:
    found = {shard: match(shard) for shard in shards}
    meant = [shard for shard, pattern in found.items() if pattern is not None]
    if meant and len(meant) < len(shards):
        rest = [shard for shard in shards if shard not in meant]
        raise _core.CheckpointError(
            f"{module}: the configuration excludes {', '.join(meant)} from quantization and not "
            f"{', '.join(rest)}, but the file holds them as one tensor"
        )
    return found[shards[0]]
