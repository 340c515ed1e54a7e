"""The statistics of a paired comparison: the same items under two choices, and the verdict.

n items; b were right under the first choice and wrong under the second, c the other way round;
d = (b - c) / n is the loss of accuracy, q = (b + c) / n the share of flips. Intervals are
two-sided. Nothing here draws at random except block_bootstrap, which is given its seed.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import ndtri, stdtrit
from scipy.stats import binomtest

from .params import integer

__all__ = [
    "Interval",
    "Verdict",
    "block_bootstrap",
    "clopper_pearson",
    "clustered_interval",
    "clustered_se",
    "detectable",
    "hazard",
    "holm",
    "kl_allowance",
    "kl_beyond_control",
    "mcnemar_exact",
    "mcnemar_midp",
    "needed",
    "needed_safe",
    "paired_se",
    "tango_interval",
    "verdict",
    "wilson",
]

#: Both limits of a two-sided 95 % interval: the level of every formula on sample sizes.
_Z_SIZE = float(ndtri(0.975))
#: A mean KL this many times the control lane's is more than any change at all would cause, and
#: more than rounding to bf16 explains; for coarser formats see kl_allowance.
_KL_FACTOR = 10.0
#: The baseline must lie this many margins above chance, or it has nothing to lose.
_MARGINS_ABOVE_CHANCE = 3
#: No task is larger; more items than these are "cannot be decided".
_MOST_ITEMS = 2**31 - 1
#: Draws of one step of the bootstrap, so that its memory does not grow with the resamples.
_DRAWS_PER_STEP = 2**20


class Interval(NamedTuple):
    lower: float
    upper: float


# ---- what is accepted ------------------------------------------------------------------------


def _number(name: str, value: Any, low: float, high: float, ends: str = "[]") -> float:
    """The value as a float within low and high; "(" and ")" leave an end out."""
    if isinstance(value, (bool, str, bytes)):
        raise TypeError(f"{name}={value!r}: a number is needed")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r}: a number is needed") from None
    except OverflowError:
        number = math.inf
    above = number > low if ends[0] == "(" else number >= low
    below = number < high if ends[1] == ")" else number <= high
    if not (above and below):  # NaN is neither
        raise ValueError(f"{name}={number}: must be in {ends[0]}{low:g}, {high:g}{ends[1]}")
    return number


def _count(name: str, value: Any, low: int = 0, high: int = _MOST_ITEMS) -> int:
    if isinstance(value, (float, np.floating)) and not math.isfinite(value):
        raise ValueError(f"{name}={value}: must be an integer within {low} and {high}")
    return integer(name, value, low, high)


def _flips(b: Any, c: Any, n: Any) -> tuple[int, int, int]:
    b, c, n = _count("b", b), _count("c", c), _count("n", n, low=1)
    if b + c > n:
        raise ValueError(f"b + c={b + c}: must be at most n={n}")
    return b, c, n


def _values(name: str, values: ArrayLike) -> NDArray[np.float64]:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: numbers are needed") from None
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name}: shape {array.shape}, must be one dimension of at least 1")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}]={array[bad[0]]}: must be finite")
    return array


def _labels(name: str, labels: Iterable[Hashable], size: int) -> NDArray[np.intp]:
    """[size] the number of each item's group, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    found = [numbers.setdefault(label, len(numbers)) for label in labels]
    if len(found) != size:
        raise ValueError(f"{name}: {len(found)} labels, must be one for each of {size} values")
    if len(numbers) < 2:
        raise ValueError(f"{name}: {len(numbers)} different label, must be at least 2")
    return np.array(found, dtype=np.intp)


def _z(confidence: float) -> float:
    return float(ndtri((1 + _number("confidence", confidence, 0, 1, "()")) / 2))


# ---- two choices, the same items -------------------------------------------------------------


def mcnemar_exact(b: int, c: int) -> float:
    """The two-sided p value of "flips go either way equally often", from the binomial."""
    b, c = _count("b", b), _count("c", c)
    return float(binomtest(b, b + c, 0.5).pvalue) if b + c else 1.0


def mcnemar_midp(b: int, c: int) -> float:
    """The same with half the weight on what was observed: mcnemar_exact less P(X = min(b, c)),
    and 1 where b = c (twice a tail of exactly one half)."""
    b, c = _count("b", b), _count("c", c)
    if b == c:
        return 1.0
    few, flips = min(b, c), b + c
    below = binomtest(few, flips, 0.5, alternative="less").pvalue
    before = binomtest(few - 1, flips, 0.5, alternative="less").pvalue if few else 0.0
    return float(below + before)


def paired_se(b: int, c: int, n: int) -> float:
    """The standard error of d, sqrt((q - d^2) / n)."""
    b, c, n = _flips(b, c, n)
    return math.sqrt(((b + c) - (b - c) ** 2 / n) / n / n)


def tango_interval(b: int, c: int, n: int, confidence: float = 0.95) -> Interval:
    """Tango's score interval of d = (b - c) / n (Statistics in Medicine 17:891, 1998): the losses
    that a score test at this level does not refuse. It keeps its coverage where flips are few,
    and does not collapse to a point where there are none."""
    return _tango(*_flips(b, c, n), _z(confidence))


def _tango(b: float, c: float, n: float, z: float) -> Interval:
    """Of counts that need not be whole: _enough_items plans with fractions of an item."""
    return Interval(-_tango_upper(c, b, n, z), _tango_upper(b, c, n, z))


def _tango_upper(b: float, c: float, n: float, z: float) -> float:
    # Where the estimate itself has no variance, it solves the equation too; the limit is the
    # other solution.
    if b == c == 0:
        return z * z / (n + z * z)
    if b >= n:
        return 1.0
    if c >= n:
        return (z * z - n) / (n + z * z)

    def beyond(loss: float) -> float:
        spread = math.sqrt(n * _tango_variance(b, c, n, loss))
        return n * loss - (b - c) - z * spread

    return float(brentq(beyond, (b - c) / n, 1.0, xtol=1e-14, rtol=1e-14))


def _tango_variance(b: float, c: float, n: float, loss: float) -> float:
    """The variance of one item's difference if the loss were this one: 2 p + loss (1 - loss), p the
    share wrong -> right that is most likely then, the larger root of 2 n p^2 + k p + m = 0."""
    k = (2 * n - b + c) * loss - b - c
    m = -c * loss * (1 - loss)
    root = math.sqrt(max(k * k - 8 * n * m, 0.0))
    # Of the two ways to write the root, the one that does not subtract like from like.
    p = (root - k) / (4 * n) if k <= 0 else -2 * m / (root + k)
    return max(2 * p + loss * (1 - loss), 0.0)


def clustered_se(x: ArrayLike, groups: Iterable[Hashable]) -> float:
    """The standard error of the mean of x where items of a group depend on each other (Miller,
    arXiv 2411.00640): sqrt(sum over groups of (sum of x - mean)^2) / n. For a comparison x is
    correct under the first choice less correct under the second."""
    values = _values("x", x)
    labels = _labels("groups", groups, values.size)
    sums = np.bincount(labels, weights=values - values.mean())
    return math.sqrt(float(sums @ sums)) / values.size


def clustered_interval(
    x: ArrayLike, groups: Sequence[Hashable], confidence: float = 0.95
) -> Interval:
    """The mean of x with clustered_se, by Student's t with one degree of freedom less than there
    are groups: they are few."""
    level = (1 + _number("confidence", confidence, 0, 1, "()")) / 2
    values, half = _values("x", x), clustered_se(x, groups)
    half *= float(stdtrit(len(set(groups)) - 1, level))
    return Interval(float(values.mean()) - half, float(values.mean()) + half)


# ---- one choice ------------------------------------------------------------------------------


def wilson(correct: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of an accuracy."""
    return _share(correct, n, confidence, "wilson")


def clopper_pearson(correct: int, n: int, confidence: float = 0.95) -> Interval:
    """The exact interval of an accuracy, which never covers less than it says."""
    return _share(correct, n, confidence, "exact")


def _share(correct: int, n: int, confidence: float, method: Literal["exact", "wilson"]) -> Interval:
    n = _count("n", n, low=1)
    correct = _count("correct", correct, high=n)
    confidence = _number("confidence", confidence, 0, 1, "()")
    found = binomtest(correct, n).proportion_ci(confidence, method)
    return Interval(float(found.low), float(found.high))


def hazard(share_identical: float, mean_length: float) -> float:
    """The chance per token that two outputs part, from the share that never did."""
    share = _number("share_identical", share_identical, 0, 1)
    length = _number("mean_length", mean_length, 0, math.inf, "()")
    return 0.0 - math.expm1(math.log(share) / length) if share else 1.0  # 0 and not -0


# ---- how many items --------------------------------------------------------------------------


def _z_power(power: float) -> float:
    return float(ndtri(_number("power", power, 0.5, 1, "[)")))


def detectable(n: int, q: float, power: float = 0.8) -> float:
    """The smallest loss that n items with a share q of flips show (95 %, two-sided) with this
    power: delta = (z sqrt(q) + z_power sqrt(q - delta^2)) / sqrt(n). Fewer than 4 items show no
    loss at all: inf. Without a single flip q is not 0; ask with the upper limit of its interval."""
    n, q, z_power = _count("n", n, low=1), _number("q", q, 0, 1, "(]"), _z_power(power)
    if n < _Z_SIZE**2:
        return math.inf
    # The equation solved for delta: a quadratic one.
    root = z_power * math.sqrt(q * (n - _Z_SIZE**2 + z_power**2))
    return (_Z_SIZE * math.sqrt(q * n) + root) / (n + z_power**2)


def needed(q: float, margin: float, power: float = 0.8) -> int:
    """The items with which detectable() reaches the margin: enough to show a loss of that size."""
    q, margin, z_power = _number("q", q, 0, 1, "(]"), _margin(margin), _z_power(power)
    if margin**2 > q:
        raise ValueError(f"margin={margin}: must be at most sqrt(q)={math.sqrt(q)}")
    root = (_Z_SIZE * math.sqrt(q) + z_power * math.sqrt(q - margin**2)) / margin
    return math.ceil(root * root)


def needed_safe(q: float, margin: float, power: float = 0.8) -> int:
    """The items that show with this power that a change which loses nothing, with a share q of
    flips, loses less than the margin: q ((z + z_power) / margin)^2."""
    q, margin, z_power = _number("q", q, 0, 1), _margin(margin), _z_power(power)
    return _items_safe(q, margin, _Z_SIZE + z_power)


def _items_safe(q: float, margin: float, z_sum: float) -> int:
    return math.ceil(q * (z_sum / margin) ** 2)


def _margin(margin: float) -> float:
    return _number("margin", margin, 1e-6, 1, "[)")


# ---- several tasks, and means over tokens ----------------------------------------------------


def holm(p_values: Iterable[float]) -> list[float]:
    """Each p value adjusted for there being several (Holm 1979), in the order given."""
    p = [_number(f"p_values[{i}]", value, 0, 1) for i, value in enumerate(p_values)]
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def block_bootstrap(
    values: ArrayLike,
    blocks: int | Iterable[Hashable] = 512,
    *,
    n_resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """The percentile interval of the mean of values that depend on their neighbours, by drawing
    whole blocks: `blocks` is a length, or a label (a document) for each value. The draws come from
    the raw stream of PCG64, which NumPy does not change from release to release."""
    array = _values("values", values)
    n_resamples = _count("n_resamples", n_resamples, 1, 10**6)
    seed = integer("seed", seed, 0, 2**64 - 1)
    tail = (1 - _number("confidence", confidence, 0, 1, "()")) / 2
    labels = _block_labels(blocks, array.size)
    sums = np.bincount(labels, weights=array)
    sizes = np.bincount(labels).astype(np.float64)
    stream = np.random.PCG64(seed)
    means = np.empty(n_resamples)
    step = max(1, _DRAWS_PER_STEP // sums.size)
    for start in range(0, n_resamples, step):
        shape = (min(step, n_resamples - start), sums.size)
        # The upper 32 bits, scaled to a block's number: uniform but for 2^-32 of the blocks.
        raw = stream.random_raw(shape[0] * shape[1]) >> np.uint64(32)
        drawn = ((raw * np.uint64(sums.size)) >> np.uint64(32)).astype(np.intp).reshape(shape)
        # Blocks may differ in length: a mean over tokens, not over blocks.
        means[start : start + shape[0]] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    lower, upper = np.quantile(means, [tail, 1 - tail])
    return Interval(float(lower), float(upper))


def _block_labels(blocks: int | Iterable[Hashable], size: int) -> NDArray[np.intp]:
    if isinstance(blocks, Iterable):
        return _labels("blocks", blocks, size)
    length = _count("blocks", blocks, low=1)
    if length >= size:
        raise ValueError(f"blocks={length}: must be less than the {size} values, for two blocks")
    return np.arange(size, dtype=np.intp) // length


def kl_allowance(step: float = 1.0) -> float:
    """How many times the control lane's mean KL a format's own rounding may explain, with room.

    step: the format's relative rounding step in steps of bf16 (e4m3 keeps 4 bits less: 16). KL goes
    with the variance of the error. Rounding to nearest has step^2 / 12; the control's difference
    from bf16, where one of two neighbours is drawn, has 1/4: step^2 / 3 times. Never less than ten.
    Sound caches lie at a third of it (SmolLM2-135M, Gemma 3 270M, Qwen2.5 0.5B on WikiText-2:
    e4m3 25, 27, 29 of 85; e5m2 94, 126, 112 of 341; nvfp4 315, 312 of 1365), so ten times the
    control for every format would call each of them damaged."""
    return max(_KL_FACTOR, _number("step", step, 1, math.inf, "[)") ** 2 / 3)


def kl_beyond_control(lower: float, control: float, step: float = 1.0) -> bool:
    """Whether the lower limit of the mean KL is beyond what the control lane's mean KL and the
    format's rounding explain: kl_allowance(step) times the control's."""
    lower = _number("lower", lower, -math.inf, math.inf, "()")
    return lower > kl_allowance(step) * _number("control", control, 0, math.inf, "[)")


# ---- the verdict -----------------------------------------------------------------------------

VerdictKind = Literal["SAFE", "NOT SAFE", "NOT ENOUGH DATA", "UNINFORMATIVE"]


@dataclass(frozen=True)
class Verdict:
    """What the data say about a loss of accuracy beyond the margin."""

    kind: VerdictKind
    reason: str
    interval: Interval  # of the loss
    needed: int | None = None  # NOT ENOUGH DATA: items beyond these n; None: no number decides

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def verdict(
    b: int,
    c: int,
    n: int,
    correct_a: int,
    *,
    margin: float = 0.01,
    chance: float = 0.0,
    kl_alarm: bool = False,
    task_size: int | None = None,
    confidence: float = 0.95,
) -> Verdict:
    """Whether the second choice is safe: of n items the first had correct_a right, and b and c
    flipped. The margin is the largest loss that would be accepted, and is declared beforehand.

    A KL alarm comes first: KL speaks where the task does not. Next comes a baseline that cannot do
    the task and so cannot lose it, then the interval of the loss. "Not significant" is no verdict.
    """
    b, c, n = _flips(b, c, n)
    correct_a = _count("correct_a", correct_a, low=b, high=n - c)
    margin, chance = _margin(margin), _number("chance", chance, 0, 1, "[)")
    size = None if task_size is None else _count("task_size", task_size, low=n)
    if not isinstance(kl_alarm, (bool, np.bool_)):
        raise TypeError(f"kl_alarm={kl_alarm!r}: True or False is needed")
    interval = tango_interval(b, c, n, confidence)
    floor = clopper_pearson(correct_a, n, confidence).lower
    informative = floor > chance + _MARGINS_ABOVE_CHANCE * margin
    loss = _loss_in_words(interval, margin, confidence)

    if kl_alarm:
        reason = "KL alarm: the predictions moved further than rounding explains; "
        reason += loss if informative else _at_chance(floor, chance, margin)
        return Verdict("NOT SAFE", reason, interval)
    if not informative:
        return Verdict("UNINFORMATIVE", f"{_at_chance(floor, chance, margin)}; {loss}", interval)
    if interval.lower > margin:
        return Verdict("NOT SAFE", loss, interval)
    if interval.upper < margin:
        return Verdict("SAFE", loss, interval)
    total, case = _enough_items(b, c, n, margin, _z(confidence))
    if total is None:
        return Verdict("NOT ENOUGH DATA", f"{loss}; cannot be decided with this task", interval)
    reason = f"{loss}; items still needed: {total - n} ({case})"
    if size is not None and total > size:
        reason += f": cannot be decided with this task, which has {size}"
    return Verdict("NOT ENOUGH DATA", reason, interval, total - n)


def _points(share: float) -> str:
    return f"{100 * share:.3f}"


def _loss_in_words(interval: Interval, margin: float, confidence: float) -> str:
    lower, upper = interval
    span = f"{_points(lower)} to {_points(upper)} points ({100 * confidence:g} %)"
    bound = f"the margin of {100 * margin:g}"
    if lower > margin:
        return f"a loss of {span} is proven, more than {bound}"
    if lower > 0 and upper < margin:
        return f"a loss of {span} is proven, but it is small: less than {bound}"
    if lower > 0:
        return f"a loss of {span} is proven, but not that it exceeds {bound}"
    if upper < margin:
        return f"the loss is {span}, less than {bound}"
    return f"the loss is {span}: it may exceed {bound}"


def _at_chance(floor: float, chance: float, margin: float) -> str:
    least = chance + _MARGINS_ABOVE_CHANCE * margin
    return (
        f"the baseline's accuracy is shown to be {_points(floor)} % only, not above"
        f" {_points(least)} %, which is chance and three margins: it cannot lose what it cannot do"
    )


def _enough_items(b: int, c: int, n: int, margin: float, z: float) -> tuple[int | None, str]:
    """How many items decide, and in which case. First as if the change lost nothing, which is what
    can be planned for; with that many at hand and undecided still, as if items flipped on as
    observed. None: more than any task has."""
    total = _items_safe((b + c) / n, margin, z + _z_power(0.8))
    if total > n:
        return total, "if the change loses nothing"

    def undecided(items: int) -> bool:
        lower, upper = _tango(b * items / n, c * items / n, items, z)
        return lower <= margin <= upper

    case = "if items flip as they did so far"
    low, high = n, 2 * n  # of which low is undecided
    while undecided(high):
        low, high = high, 2 * high
        if low > _MOST_ITEMS:
            return None, case
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if undecided(middle) else (low, middle)
    return high, case
