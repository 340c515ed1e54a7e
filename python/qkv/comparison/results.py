"""What a comparison finds: plain data, made by analysis.py from the journal's records, shown by
report.py. Losses are the baseline's accuracy less the lane's, as shares (0.01 is a point); KL is in
nats; intervals are 95 %, two-sided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..stats import Interval, Verdict, VerdictKind


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One choice of weights and KV format. The first lane is the baseline."""

    name: str  # "fp8_e4m3"; with several models "Qwen3-8B-FP8 / fp8_e4m3"
    model: str  # its label: the end of its path, as much as tells it apart
    kv_cache_dtype: Any  # as Engine takes it
    kv_name: str
    control: bool = False  # bf16 rounded stochastically: what any change at all would cause
    bytes_per_token: int = 0  # of the KV cache, over all layers
    #: Tokens that fit beside the weights in the machine's memory, were this the only lane.
    pool_tokens: int = 0
    scales: str = ""  # where the KV scales come from: "checkpoint", "file", "1.0", "none needed"
    #: Shares over all stored values of K and V: out of range, and not zero but stored as zero.
    clipped: float = 0.0
    flushed: float = 0.0
    #: Relative to the first lane: tokens per second; 0 if not measured.
    decode_speed: float = 0.0
    prefill_speed: float = 0.0


def control_lane(lanes: Sequence[Lane], model: str) -> Lane | None:
    """The control lane over this model's weights; without one, that of the first model."""
    found = [lane for lane in lanes if lane.control]
    return next((lane for lane in found if lane.model == model), found[0] if found else None)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Mean KL of the tokens at positions low .. high - 1 of their sequence."""

    low: int
    high: int
    n_tokens: int
    mean: float
    interval: Interval | None  # None: too few tokens for two blocks
    top1: float  # share of tokens whose most likely token is the baseline's


@dataclass(frozen=True, kw_only=True)
class Kl:
    """A lane's predictions beside the baseline's, on the same given tokens (teacher-forced)."""

    n_tokens: int
    mean: float
    interval: Interval | None  # of the mean, by block bootstrap; None: too few blocks
    median: float
    p99: float
    p999: float
    max: float
    mean_reverse: float
    top1: float
    nll_change: float  # mean of the lane's negative log-likelihood less the baseline's
    nll_interval: Interval | None
    rms_p_change: float  # root mean square of the change of the given token's probability
    buckets: tuple[Bucket, ...]
    #: The interval's lower limit is beyond what the control lane's mean and the format's rounding
    #: explain (stats.kl_allowance), or not_finite > 0.
    alarm: bool
    #: Of n_tokens: NaN or infinite, and left out of every figure here.
    not_finite: int = 0
    #: The lane that was compared with: the first one of the same weights.
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where freely generated texts part from the baseline's."""

    n: int  # pairs of outputs
    identical: int
    median_first: float | None  # token of the first difference, among those that differ
    hazard: float  # chance per token that two outputs part
    excess: float | None  # the same less the control lane's; None without a control lane


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How one lane did on one task, alone."""

    n: int  # rows that count: answered by every lane without an error
    correct: int
    truncated: int  # ran into max_tokens
    unanswered: int  # no answer could be read
    errors: int  # rows that this lane could not run; no lane's accuracy has them
    mean_tokens: float  # generated, per row
    interval: Interval  # of the accuracy, Clopper-Pearson

    @property
    def accuracy(self) -> float:
        return self.correct / self.n


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A lane beside the baseline on one task's items."""

    lost: int  # right under the baseline, wrong here (b)
    gained: int  # the other way round (c)
    other_wrong: int  # wrong in both, with different answers
    loss: float  # (b - c) / n
    interval: Interval  # of the loss, Tango's
    clustered: Interval | None  # of the loss, by the task's strata; None where it has none
    p_exact: float  # McNemar
    p_mid: float
    p_holm: float  # p_exact adjusted over the tasks of this lane
    #: The smallest loss that this n shows with a power of 80 %; inf: n is too small for any.
    detectable: float
    verdict: Verdict | None  # None for the control lane


@dataclass(frozen=True, kw_only=True)
class LaneResult:
    """One lane on one task. pair is None for the baseline, and for tasks without answers; kl for a
    model's first lane, and where nothing was scored."""

    lane: str
    answers: Answers | None = None
    pair: Pair | None = None
    kl: Kl | None = None
    divergence: Divergence | None = None
    #: Only for tasks of given text: exp of the mean negative log-likelihood.
    perplexity: float | None = None
    #: The answers by stratum (MMLU's subjects, needle's length and depth), where there are any.
    strata: Mapping[str, Answers] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    task: str
    kind: Literal["generate", "choice", "text"]
    n: int  # items done by all lanes
    asked: int  # items that were to be done
    size: int  # of the whole data set
    chance: float
    note: str  # e.g. "short generation only"
    lanes: Mapping[str, LaneResult]


@dataclass(frozen=True, kw_only=True)
class LaneVerdict:
    """Over all tasks: SAFE needs SAFE on each."""

    lane: str
    kind: VerdictKind
    reason: str
    #: What differs from the baseline: ("KV cache",), ("weights",), or both: then the 2 x 2 is due.
    differs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """One layer's K, V or both in the lower format, all else as the baseline."""

    layer: int
    part: Literal["k", "v", "kv"]
    kl: float  # inf if it is not finite at one token
    interval: Interval | None
    top1: float


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Formats by layer, measured as a whole."""

    kv_cache_dtype: Mapping[str, Any]  # what Engine(kv_cache_dtype=...) takes
    bytes_per_token: int
    kl: float
    interval: Interval | None
    bound: float  # the KL that it was to stay under
    met: bool
    #: (K and V of layers that stay in the baseline's format, KL, bytes per token) of each trial;
    #: where layers were run whole, layers.
    tried: tuple[tuple[int, float, int], ...]


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Which layers need the higher format."""

    lane: str  # the lower format
    text: str  # what was scored, e.g. "wikitext2, 4 x 512 tokens"
    n_tokens: int
    computed: int  # rows times layers
    skipped: int  # rows times layers below a change, computed once in the baseline
    layers: tuple[LayerSensitivity, ...]
    full: float  # KL with every layer in the lower format
    control: float | None
    mix: Mix | None = None
    #: As compare(by_layer=, kl_bound=) takes them.
    by_layer: Mapping[str, Any] = field(default_factory=dict)
    kl_bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class TwoByTwo:
    """Weights and KV format apart and together: the loss on one task, or mean KL."""

    task: str
    models: tuple[str, str]  # their labels
    kv: tuple[str, str]
    #: accuracy of [model][kv]
    accuracy: tuple[tuple[float, float], tuple[float, float]]
    weights_loss: float  # at the first KV format
    kv_loss: float  # with the first weights
    both_loss: float
    interaction: float  # both_loss less the sum of the two


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """Items run again in another order and batch size before the main run."""

    items: int
    lanes: int
    identical: bool
    first_difference: str = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All of it."""

    settings: Mapping[str, Any]  # what was asked for
    environment: Mapping[str, Any]  # digests of the build and the models, instruction set
    lanes: tuple[Lane, ...]
    margin: float
    tasks: Mapping[str, TaskResult]
    verdicts: Mapping[str, LaneVerdict]  # by lane, without baseline and control
    rerun: Rerun | None
    sensitivity: Mapping[str, Sensitivity] = field(default_factory=dict)  # by lane
    two_by_two: tuple[TwoByTwo, ...] = ()
    warnings: tuple[str, ...] = ()
