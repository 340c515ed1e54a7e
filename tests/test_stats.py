"""qkv.stats: formulas against check numbers and real data, the rules of the verdict, bad input."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

import qkv
from qkv import stats
from qkv.stats import tango_interval, verdict

DATA = Path(__file__).resolve().parents[2] / "shared/data"
Z = 1.959963984540054


def rows_of(name: str) -> list[dict[str, str]]:
    """Read as plain text: a reader with notions of missing values would change answers."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no real data: ../shared/data/{name} is not there")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def half_up(value: float, digits: int) -> float:
    scale: int = 10**digits
    return math.floor(value * scale + 0.5) / scale


# ---- McNemar ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (1, 9, 0.021484), (10, 20, 0.098737), (0, 5, 0.0625), (5, 5, 1.0), (15, 30, 0.035698),
        (121, 150, 0.08878), (91, 86, 0.7638), (8, 6, 0.79), (14, 12, 0.85), (34, 32, 0.90),
        (54, 52, 0.92), (12, 2, 0.0129), (40, 30, 0.28), (75, 65, 0.45), (146, 136, 0.59),
        (356, 346, 0.73), (946, 936, 0.84), (866, 746, 0.0030), (1263, 1143, 0.0152),
        (1300, 1020, 6.66e-9), (1073, 1002, 0.1243), (1065, 1012, 0.2539), (0, 0, 1.0),
    ],
)  # fmt: skip
def test_exact_p(b: int, c: int, p: float) -> None:
    digits = 6 if p in (0.021484, 0.098737, 0.035698) else 5 if p == 0.08878 else 4
    tolerance = 0.005e-9 if p < 1e-6 else 0.5 * 10.0**-digits if p != half_up(p, 2) else 0.005
    assert abs(stats.mcnemar_exact(b, c) - p) <= tolerance * 1.000001
    assert stats.mcnemar_exact(c, b) == stats.mcnemar_exact(b, c)


def test_midp() -> None:
    assert stats.mcnemar_midp(1, 9) == pytest.approx(0.011719, abs=5e-7)
    assert stats.mcnemar_midp(0, 5) == pytest.approx(0.03125, abs=1e-15)
    # Equally many either way, none included, speak for no difference at all.
    assert stats.mcnemar_midp(0, 0) == stats.mcnemar_midp(7, 7) == 1.0


def test_p_values_against_whole_numbers() -> None:
    for b, c in itertools.product(range(26), repeat=2):
        flips, few = b + c, min(b, c)
        tail = sum(Fraction(math.comb(flips, i), 2**flips) for i in range(few + 1))
        exact = min(Fraction(1), 2 * tail)
        midp = 2 * tail - Fraction(math.comb(flips, few), 2**flips)
        assert stats.mcnemar_exact(b, c) == pytest.approx(float(exact), rel=1e-12)
        assert stats.mcnemar_midp(b, c) == pytest.approx(float(midp), rel=1e-12)
        assert stats.mcnemar_midp(b, c) <= stats.mcnemar_exact(b, c)
        assert stats.mcnemar_midp(b, c) == stats.mcnemar_midp(c, b)


@pytest.mark.parametrize(
    ("net", "most", "last_significant"), [(2, 154, 0), (10, 3068, 20), (120, 4864, 3686)]
)
def test_which_published_pairs_differ(net: int, most: int, last_significant: int) -> None:
    """GSM8K 94.24 / 94.09 for no number of flips, MMLU for at most 20, MMLU-Pro to 3686."""
    near = {d for d in range(last_significant - 8, last_significant + 10, 2) if net <= d <= most}
    for flips in sorted(near | set(range(net, most + 1, max(2, most // 80 * 2)))):
        p = stats.mcnemar_exact((flips + net) // 2, (flips - net) // 2)
        assert (p < 0.05) == (flips <= last_significant), flips


# ---- the loss: standard errors and Tango's interval ------------------------------------------

# b, c, n and the interval d +- 1.96 SE in points.
WALD = [
    (8, 6, 1319, -0.40, 0.71), (14, 12, 1319, -0.61, 0.91), (34, 32, 1319, -1.06, 1.36),
    (54, 52, 1319, -1.38, 1.68), (75, 65, 14042, -0.09, 0.24), (146, 136, 14042, -0.16, 0.31),
    (356, 346, 14042, -0.30, 0.44), (946, 936, 14042, -0.53, 0.68), (361, 241, 12032, 0.60, 1.40),
    (866, 746, 12032, 0.34, 1.65), (1263, 1143, 12032, 0.20, 1.80), (662, 542, 12032, 0.43, 1.56),
    (1865, 1745, 12032, 0.02, 1.98),
]  # fmt: skip


@pytest.mark.parametrize(("b", "c", "n", "lower", "upper"), WALD)
def test_paired_se(b: int, c: int, n: int, lower: float, upper: float) -> None:
    d, half = (b - c) / n, Z * stats.paired_se(b, c, n)
    assert 100 * (d - half) == pytest.approx(lower, abs=0.00501)
    assert 100 * (d + half) == pytest.approx(upper, abs=0.00501)
    # With this many items the score interval lies where the simple one does.
    assert np.allclose(tango_interval(b, c, n), [d - half, d + half], atol=0.0015, rtol=0)


def test_paired_se_is_that_of_the_differences() -> None:
    x = np.repeat([1.0, -1.0, 0.0], [17, 5, 78])
    assert stats.paired_se(17, 5, 100) == pytest.approx(x.std() / 10, rel=1e-14)
    # Each item a group of its own: the same number.
    assert stats.clustered_se(x, range(100)) == pytest.approx(stats.paired_se(17, 5, 100))


def test_no_flip() -> None:
    assert tango_interval(0, 0, 380).upper == pytest.approx(Z**2 / (380 + Z**2), rel=1e-14)
    assert tango_interval(0, 0, 380).upper > 0.01 > tango_interval(0, 0, 385).upper
    # All items flip the same way: the limit that is not the estimate itself.
    assert tango_interval(0, 10, 10) == pytest.approx((-1, (Z**2 - 10) / (Z**2 + 10)))
    # The exact one-sided 95 % limit of a share is the upper limit of the 90 % interval: 3 / n.
    assert stats.clopper_pearson(0, 1319, 0.9).upper == pytest.approx(0.00227, abs=5e-6)
    assert stats.clopper_pearson(0, 14042, 0.9).upper == pytest.approx(0.000214, abs=1e-6)


def test_tango_against_a_published_interval() -> None:
    """Airway responsiveness of 21 children, in Fagerland, Lydersen and Laake (2014)."""
    assert tango_interval(1, 7, 21) == pytest.approx((-0.517, -0.026), abs=0.0005)


def most_likely_spread(b: int, c: int, n: int, loss: float) -> float:
    """The variance of b - c where the likelihood is largest for a given loss, by searching."""
    low, high = max(0.0, -loss), (1 - loss) / 2

    def cost(p: float) -> float:
        shares = (p + loss, p, 1 - 2 * p - loss)
        counts = (b, c, n - b - c)
        return -sum(k * math.log(max(s, 1e-300)) for k, s in zip(counts, shares, strict=True) if k)

    p = minimize_scalar(cost, bounds=(low, high), method="bounded", options={"xatol": 1e-13}).x
    return n * (2 * float(p) + loss - loss**2)


def test_tango_limits_are_where_the_score_test_turns() -> None:
    for b, c, n in [(9, 1, 50), (1, 7, 21), (0, 3, 40), (5, 0, 30), (4, 4, 9), (34, 32, 1319)]:
        for loss in tango_interval(b, c, n):
            score = (b - c - n * loss) ** 2 / most_likely_spread(b, c, n, loss)
            assert score == pytest.approx(Z**2, rel=1e-4), (b, c, n, loss)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_tango_is_sound_everywhere(n: int) -> None:
    for b, c in itertools.product(range(n + 1), repeat=2):
        if b + c > n:
            continue
        lower, upper = tango_interval(b, c, n)
        assert -1 <= lower <= (b - c) / n <= upper <= 1 and lower < upper
        assert tango_interval(c, b, n) == (-upper, -lower)
        wide = tango_interval(b, c, n, confidence=0.99)
        assert wide.lower <= lower and upper <= wide.upper
        if b + c < n and b < n - c:
            assert tango_interval(b + 1, c, n).upper >= upper


def test_tango_is_sound_at_any_size() -> None:
    rng = np.random.Generator(np.random.PCG64(2))
    for n in [3, 30, 1000, 10**6, 10**8, 2**31 - 1]:
        for most in [0, 1, 5, n, n, n]:
            b = int(rng.integers(0, min(n, most) + 1))
            c = int(rng.integers(0, min(n - b, most) + 1))
            lower, upper = tango_interval(b, c, n)
            assert -1 <= lower <= (b - c) / n <= upper <= 1, (b, c, n)
            assert lower < upper, (b, c, n)


def test_tango_covers_what_it_says() -> None:
    """The chance that the true loss lies in the interval, by going through every outcome."""
    n = 25
    counts = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
    limits = np.array([tango_interval(b, c, n) for b, c in counts])
    ways = np.array([math.comb(n, b) * math.comb(n - b, c) for b, c in counts], dtype=float)
    b, c = np.array(counts).T
    covered = []
    for q, share in itertools.product((0.05, 0.1, 0.2, 0.4, 0.7), (0.5, 0.6, 0.75, 0.9, 1.0)):
        right, left = q * share, q * (1 - share)
        chance = ways * right**b * left**c * (1 - q) ** (n - b - c)
        assert chance.sum() == pytest.approx(1, rel=1e-12)
        inside = (limits[:, 0] <= right - left) & (right - left <= limits[:, 1])
        covered.append(float(chance[inside].sum()))
    # Where a flip or two is all to be expected it covers nearly everything, elsewhere 95 %.
    assert min(covered) > 0.94 and np.median(covered) < 0.96


def test_clustered_interval() -> None:
    x, groups = [1.0, 1.0, 0.0, 0.0, -1.0, 0.0], ["a", "a", "b", "b", "c", "c"]
    # Sums of x - mean by group: 5/3, -1/3, -4/3.
    se = math.sqrt(25 / 9 + 1 / 9 + 16 / 9) / 6
    assert stats.clustered_se(x, groups) == pytest.approx(se, rel=1e-14)
    half = 4.302652729911275 * se  # t with 2 degrees of freedom at 0.975
    assert stats.clustered_interval(x, groups) == pytest.approx((1 / 6 - half, 1 / 6 + half))


# ---- one choice, several tasks, sizes --------------------------------------------------------


def test_intervals_of_an_accuracy() -> None:
    # At the exact limits the tail beyond the count has 2.5 %.
    lower, upper = stats.clopper_pearson(7, 20)
    above = sum(math.comb(20, k) * lower**k * (1 - lower) ** (20 - k) for k in range(7, 21))
    below = sum(math.comb(20, k) * upper**k * (1 - upper) ** (20 - k) for k in range(8))
    assert above == pytest.approx(0.025) and below == pytest.approx(0.025)
    # At Wilson's, the count is 1.96 standard errors away.
    for p in stats.wilson(7, 20):
        assert abs(0.35 - p) == pytest.approx(Z * math.sqrt(p * (1 - p) / 20))
    assert stats.clopper_pearson(0, 20).lower == stats.wilson(0, 20).lower == 0
    assert stats.clopper_pearson(20, 20).upper == stats.wilson(20, 20).upper == 1


@pytest.mark.parametrize(
    ("n", "points"),
    [
        (164, (2.17, 3.07, 4.86, 6.87, 7.95)), (500, (1.25, 1.77, 2.79, 3.95, 4.58)),
        (1319, (0.77, 1.09, 1.72, 2.44, 2.82)), (12032, (0.26, 0.36, 0.57, 0.81, 0.93)),
        (14042, (0.24, 0.33, 0.53, 0.75, 0.87)),
    ],
)  # fmt: skip
def test_detectable(n: int, points: tuple[float, ...]) -> None:
    for q, expected in zip((0.01, 0.02, 0.05, 0.10, 0.134), points, strict=True):
        found = stats.detectable(n, q)
        assert 100 * found == pytest.approx(expected, abs=0.00501), q
        assert found <= 2.8016 * math.sqrt(q / n)
        root = Z * math.sqrt(q) + 0.8416212 * math.sqrt(q - found**2)
        assert found == pytest.approx(root / math.sqrt(n), rel=1e-6)


def test_needed() -> None:
    shares = (0.01, 0.02, 0.05, 0.10, 0.134)
    assert [stats.needed(q, 0.01) for q in shares] == [783, 1568, 3923, 7847, 10516]
    for q in shares[1:]:
        assert stats.needed(q, 0.005) == pytest.approx(4 * stats.needed(q, 0.01), rel=0.002)
        n = stats.needed(q, 0.01)
        assert stats.detectable(n, q) <= 0.01 < stats.detectable(n - 1, q)
    assert stats.needed_safe(0.05, 0.01) == math.ceil(0.05 * 7.848880 / 0.01**2)
    assert stats.needed_safe(0, 0.01) == 0
    assert stats.needed(0.05, 0.01, power=0.9) > stats.needed(0.05, 0.01)
    assert stats.detectable(3, 0.5) == math.inf


def test_power_is_what_was_asked_for() -> None:
    """Of comparisons with the items that needed() names and a loss of the margin, 80 % show it."""
    q, margin = 0.2, 0.1
    n = stats.needed(q, margin)
    rng = np.random.Generator(np.random.PCG64(5))
    shares = [(q + margin) / 2, (q - margin) / 2, 1 - q]
    draws = rng.multinomial(n, shares, size=1500)
    shown = [tango_interval(int(b), int(c), n).lower > 0 for b, c, _ in draws]
    assert np.mean(shown) == pytest.approx(0.8, abs=0.035)


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    assert stats.holm([0.02]) == [0.02] and stats.holm([]) == []
    rng = np.random.Generator(np.random.PCG64(1))
    for _ in range(50):
        p = rng.random(6) ** 3
        adjusted = np.array(stats.holm(p))
        assert (adjusted >= p).all() and (adjusted <= np.minimum(1, 6 * p)).all()
        assert (np.diff(adjusted[np.argsort(p)]) >= 0).all()


def test_hazard() -> None:
    changed, control = stats.hazard(0.145, 120), stats.hazard(0.227, 120)
    assert 100 * changed == pytest.approx(1.60, abs=0.005)
    assert 100 * control == pytest.approx(1.23, abs=0.005)
    assert 100 * (changed - control) == pytest.approx(0.37, abs=0.005)
    assert stats.hazard(1, 50) == 0 and stats.hazard(0, 50) == 1
    assert (1 - stats.hazard(0.3, 77.5)) ** 77.5 == pytest.approx(0.3)


# ---- the bootstrap ---------------------------------------------------------------------------


def correlated(n_blocks: int, length: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return np.repeat(rng.normal(size=n_blocks), length) + 0.1 * rng.normal(size=n_blocks * length)


def test_bootstrap_repeats() -> None:
    x = correlated(30, 64, 2)
    first = stats.block_bootstrap(x, 64, seed=7)
    assert stats.block_bootstrap(x, 64, seed=7) == first != stats.block_bootstrap(x, 64, seed=8)
    # Recorded: the draws are the same on every machine and with every release of NumPy.
    found = stats.block_bootstrap(np.arange(40) % 7, 8, n_resamples=500, seed=3)
    assert found == pytest.approx((2.725, 3.05), rel=1e-12)


def test_bootstrap_draws_blocks_not_values() -> None:
    x = correlated(60, 64, 3)
    means = x.reshape(60, 64).mean(axis=1)
    half = Z * means.std() / math.sqrt(60)
    lower, upper = stats.block_bootstrap(x, 64, n_resamples=4000)
    assert (upper - lower) / 2 == pytest.approx(half, rel=0.1)
    assert lower < x.mean() < upper
    narrow = stats.block_bootstrap(x, 1, n_resamples=4000)
    assert (narrow.upper - narrow.lower) < (upper - lower) / 4
    wide = stats.block_bootstrap(x, 64, n_resamples=4000, confidence=0.99)
    assert wide.lower < lower and upper < wide.upper
    # A label for each value says the same as a length.
    assert stats.block_bootstrap(x, np.arange(x.size) // 64, n_resamples=4000) == (lower, upper)


def test_bootstrap_weighs_tokens_and_takes_documents_of_any_length() -> None:
    # Documents of 1 and 9 tokens with the same mean: no spread, whichever are drawn.
    documents = ["a"] + ["b"] * 9 + ["c"] * 3
    assert stats.block_bootstrap([2.0] * 13, documents) == (2.0, 2.0)
    # Two documents: a quarter of the draws each are one alone, half are both.
    lower, upper = stats.block_bootstrap([0.0] + [10.0] * 9, ["a"] + ["b"] * 9)
    assert (lower, upper) == (0.0, 10.0)
    both = stats.block_bootstrap([0.0] + [10.0] * 9, ["a"] + ["b"] * 9, confidence=0.01)
    assert both == (9.0, 9.0)  # by tokens; by documents it would be 5
    # Many blocks are drawn in several steps, of which no one shows.
    x = correlated(3000, 2, 4)
    half = Z * x.reshape(-1, 2).mean(axis=1).std() / math.sqrt(3000)
    lower, upper = stats.block_bootstrap(x, 2, n_resamples=1500)
    assert (upper - lower) / 2 == pytest.approx(half, rel=0.1)


def test_bootstrap_covers_what_it_says() -> None:
    inside = 0
    for seed in range(300):
        lower, upper = stats.block_bootstrap(correlated(40, 4, seed), 4, n_resamples=400, seed=seed)
        inside += lower <= 0 <= upper
    assert 0.90 <= inside / 300 <= 0.985


def test_kl_alarm() -> None:
    assert stats.kl_beyond_control(0.0101, 0.001)
    assert not stats.kl_beyond_control(0.0099, 0.001)
    assert not stats.kl_beyond_control(0.0, 0.0)  # the same numbers in both
    assert stats.kl_beyond_control(1e-9, 0.0)
    # e4m3's step is 16 of bf16's: 16^2 / 3 = 85.3 times the control's is what rounding explains.
    assert stats.kl_allowance(16) == pytest.approx(85.33, abs=0.01)
    assert not stats.kl_beyond_control(0.0853, 0.001, 16)
    assert stats.kl_beyond_control(0.0854, 0.001, 16)
    assert stats.kl_allowance(1) == stats.kl_allowance(4) == 10.0
    with pytest.raises(ValueError, match="step"):
        stats.kl_allowance(0.5)


# ---- the verdict -----------------------------------------------------------------------------


def test_safe() -> None:
    found = verdict(8, 6, 1319, 1243)
    assert found.kind == "SAFE" and found.needed is None and "proven" not in found.reason
    assert found.interval == tango_interval(8, 6, 1319) and found.interval.upper < 0.01
    assert verdict(14, 12, 1319, 1243).kind == "SAFE"
    assert str(found) == f"SAFE: {found.reason}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.kind = "NOT SAFE"  # type: ignore[misc]


def test_published_pairs_against_their_margins() -> None:
    for b, c in [(40, 30), (75, 65), (146, 136), (356, 346), (946, 936)]:
        assert verdict(b, c, 14042, 12513).kind == "SAFE"
        half_point = verdict(b, c, 14042, 12513, margin=0.005)
        assert (half_point.kind == "SAFE") == (b + c <= 0.05 * 14042)
    for b, c in [(361, 241), (866, 746), (1263, 1143)]:
        assert verdict(b, c, 12032, 9660, margin=0.02).kind == "SAFE"
        assert verdict(b, c, 12032, 9660, margin=0.01).kind == "NOT ENOUGH DATA"


def test_a_proven_loss_is_named() -> None:
    small = verdict(866, 746, 12032, 9660, margin=0.02)
    assert small.kind == "SAFE"
    assert "is proven, but it is small: less than the margin of 2" in small.reason
    open_one = verdict(866, 746, 12032, 9660)
    assert open_one.kind == "NOT ENOUGH DATA"
    assert "is proven, but not that it exceeds the margin of 1" in open_one.reason
    large = verdict(866, 746, 12032, 9660, margin=0.003)
    assert large.kind == "NOT SAFE" and "is proven, more than the margin of 0.3" in large.reason


def test_not_significant_is_not_safe() -> None:
    assert stats.mcnemar_exact(34, 32) > 0.9
    found = verdict(34, 32, 1319, 1243)
    assert found.kind == "NOT ENOUGH DATA"
    assert found.needed == stats.needed_safe(66 / 1319, 0.01) - 1319
    assert f"items still needed: {found.needed} (if the change loses nothing)" in found.reason
    larger = verdict(34, 32, 1319, 1243, task_size=14042)
    assert "cannot be decided" not in larger.reason
    whole = verdict(34, 32, 1319, 1243, task_size=1319)
    assert whole.kind == "NOT ENOUGH DATA" and whole.needed == found.needed
    assert "cannot be decided with this task, which has 1319" in whole.reason


def test_no_flip_at_one_point() -> None:
    found = verdict(0, 0, 380, 300)
    assert (found.kind, found.needed) == ("NOT ENOUGH DATA", 1)
    assert verdict(0, 0, 381, 300).kind == "SAFE" and verdict(0, 0, 385, 300).kind == "SAFE"
    assert verdict(0, 0, 100, 90).needed == 281


@pytest.mark.parametrize(
    ("b", "c", "n"), [(1, 0, 380), (2, 1, 500), (0, 0, 50), (30, 5, 3000), (130, 70, 5000)]
)
def test_needed_decides_if_items_flip_as_they_did(b: int, c: int, n: int) -> None:
    found = verdict(b, c, n, n - c)
    assert n > stats.needed_safe((b + c) / n, 0.01) and "as they did so far" in found.reason
    assert found.kind == "NOT ENOUGH DATA" and found.needed is not None and found.needed > 0
    times = math.ceil((n + found.needed) / n)
    again = verdict(b * times, c * times, n * times, (n - c) * times)
    assert again.kind == ("SAFE" if b - c < 0.01 * n else "NOT SAFE")


def test_a_loss_of_just_the_margin_is_never_decided() -> None:
    found = verdict(240, 160, 8000, 6000)
    assert (found.kind, found.needed) == ("NOT ENOUGH DATA", None)
    assert "cannot be decided with this task" in found.reason


def test_kl_alarm_is_not_safe() -> None:
    found = verdict(8, 6, 1319, 1243, kl_alarm=True)
    assert found.kind == "NOT SAFE" and "KL alarm" in found.reason
    # KL speaks where the task cannot.
    chance = verdict(1, 1, 500, 130, chance=0.25, kl_alarm=True)
    assert chance.kind == "NOT SAFE" and "cannot lose what it cannot do" in chance.reason


def test_a_model_at_chance_is_never_safe() -> None:
    for b, c in [(0, 0), (8, 6), (900, 600), (0, 900)]:
        found = verdict(b, c, 14042, 3550, chance=0.25)
        assert found.kind == "UNINFORMATIVE" and found.needed is None
        assert "cannot lose what it cannot do" in found.reason
    assert "is proven" in verdict(900, 600, 14042, 3550, chance=0.25).reason
    assert verdict(0, 0, 1319, 0).kind == "UNINFORMATIVE"


def test_three_margins_above_chance() -> None:
    n = 14042
    for margin, chance in [(0.01, 0.25), (0.02, 0.25), (0.01, 0.0), (0.01, 0.1)]:
        least = chance + 3 * margin
        kinds = []
        for correct in range(int(n * least), n):
            kinds.append(verdict(0, 0, n, correct, margin=margin, chance=chance).kind)
            if kinds[-1] == "SAFE":
                break
        assert stats.clopper_pearson(correct, n).lower > least
        assert stats.clopper_pearson(correct - 1, n).lower <= least
        assert set(kinds[:-1]) == {"UNINFORMATIVE"}


def test_every_small_outcome_follows_the_rules() -> None:
    n, margin = 24, 0.2
    for b, c in itertools.product(range(n + 1), repeat=2):
        for correct in range(b, n - c + 1, 6):
            found = verdict(b, c, n, correct, margin=margin, chance=0.1)
            lower, upper = tango_interval(b, c, n)
            if stats.clopper_pearson(correct, n).lower <= 0.1 + 3 * margin:
                assert found.kind == "UNINFORMATIVE"
            elif upper < margin:
                assert found.kind == "SAFE"
            elif lower > margin:
                assert found.kind == "NOT SAFE"
            else:
                assert found.kind == "NOT ENOUGH DATA"
                assert found.needed is None or found.needed > 0


# ---- real data -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "b", "c", "n", "d", "paired"),
    [("mmlu", 2497, 742, 14042, 12.4982, 0.3913), ("gsm8k", 383, 95, 1319, 21.8347, 1.5447)],
)
def test_routellm(task: str, b: int, c: int, n: int, d: float, paired: float) -> None:
    rows = [r for r in rows_of("paired_correctness_routellm.csv.gz") if r["task"] == task]
    x = np.array([int(r["gpt4_1106"]) - int(r["mixtral_8x7b"]) for r in rows])
    assert (len(rows), int((x == 1).sum()), int((x == -1).sum())) == (n, b, c)
    assert 100 * x.mean() == pytest.approx(d, abs=5e-5)
    assert 100 * stats.paired_se(b, c, n) == pytest.approx(paired, abs=5e-5)
    lower, upper = tango_interval(b, c, n)
    assert 100 * (upper - lower) / 2 == pytest.approx(Z * paired, rel=0.005)
    correct = sum(int(r["gpt4_1106"]) for r in rows)
    assert verdict(b, c, n, correct, chance=0.25 if task == "mmlu" else 0).kind == "NOT SAFE"
    if task == "mmlu":
        subjects = [r["subject"] for r in rows]
        clustered = stats.clustered_se(x, subjects)
        assert len(set(subjects)) == 57
        assert 100 * clustered == pytest.approx(2.0790, abs=5e-5)
        assert (clustered / stats.paired_se(b, c, n)) ** 2 == pytest.approx(28.2, abs=0.05)
        lower, upper = stats.clustered_interval(x, subjects)
        assert lower < x.mean() - Z * clustered and x.mean() + Z * clustered < upper


@pytest.mark.parametrize(
    ("one", "other", "b", "c", "d", "p"),
    [
        ("Meta-Llama-3_1-8B", "Meta-Llama-3-8B", 1300, 1020, 2.3271, 6.66e-9),
        ("Mistral-7B-v0.1", "Mistral-7B-v0.2-hf", 1073, 1002, 0.5901, 0.1243),
        ("Meta-Llama-3_1-70B", "Meta-Llama-3-70B", 1065, 1012, None, 0.2539),
    ],
)
def test_mmlu_pro(one: str, other: str, b: int, c: int, d: float | None, p: float) -> None:
    rows = rows_of("mmlu_pro_item_preds.csv.gz")
    first = np.array([r[one] == r["answer"] for r in rows], dtype=int)
    x = first - np.array([r[other] == r["answer"] for r in rows], dtype=int)
    assert (len(rows), int((x == 1).sum()), int((x == -1).sum())) == (12032, b, c)
    assert stats.mcnemar_exact(b, c) == pytest.approx(p, rel=1e-3)
    if d is not None:
        assert 100 * x.mean() == pytest.approx(d, abs=5e-5)
    if one == "Meta-Llama-3_1-8B":
        assert 100 * stats.paired_se(b, c, 12032) == pytest.approx(0.3998, abs=5e-5)
        categories = [r["category"] for r in rows]
        assert len(set(categories)) == 14
        assert 100 * stats.clustered_se(x, categories) == pytest.approx(0.6163, abs=5e-5)
        assert verdict(b, c, 12032, int(first.sum()), chance=0.1).kind == "NOT SAFE"


# ---- what is refused -------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stats.mcnemar_exact(-1, 3), ["b=-1", "0"]),
        (lambda: stats.mcnemar_midp(3, -2), ["c=-2", "0"]),
        (lambda: stats.mcnemar_exact(NAN, 3), ["b=nan", "integer", "0"]),  # type: ignore[arg-type]
        (lambda: tango_interval(6, 5, 10), ["b + c=11", "n=10"]),
        (lambda: tango_interval(0, 0, 0), ["n=0", "1"]),
        (lambda: tango_interval(1, 1, 9, 1.0), ["confidence=1.0", "(0, 1)"]),
        (lambda: tango_interval(1, 1, 9, NAN), ["confidence=nan", "(0, 1)"]),
        (lambda: stats.paired_se(2**31, 0, 5), ["b=2147483648", "2147483647"]),
        (lambda: stats.clustered_se([1.0, NAN], "ab"), ["x[1]=nan", "finite"]),
        (lambda: stats.clustered_se([], ""), ["x", "(0,)", "1"]),
        (lambda: stats.clustered_se([[1.0]], "a"), ["x", "(1, 1)", "one dimension"]),
        (lambda: stats.clustered_se([1.0, 0.0], "abc"), ["groups", "3", "2"]),
        (lambda: stats.clustered_se([1.0, 0.0], "aa"), ["groups", "1", "2"]),
        (lambda: stats.wilson(11, 10), ["correct=11", "10"]),
        (lambda: stats.clopper_pearson(-1, 10), ["correct=-1", "0"]),
        (lambda: stats.detectable(0, 0.1), ["n=0", "1"]),
        (lambda: stats.detectable(10, 0.0), ["q=0.0", "(0, 1]"]),
        (lambda: stats.detectable(10, 0.1, power=1.0), ["power=1.0", "[0.5, 1)"]),
        (lambda: stats.needed(1.5, 0.01), ["q=1.5", "(0, 1]"]),
        (lambda: stats.needed(0.1, 0.0), ["margin=0.0", "1)"]),
        (lambda: stats.needed(0.01, 0.2), ["margin=0.2", "0.1"]),
        (lambda: stats.needed_safe(NAN, 0.01), ["q=nan", "[0, 1]"]),
        (lambda: stats.holm([0.5, 1.5]), ["p_values[1]=1.5", "[0, 1]"]),
        (lambda: stats.holm([NAN]), ["p_values[0]=nan"]),
        (lambda: stats.hazard(1.1, 10), ["share_identical=1.1", "[0, 1]"]),
        (lambda: stats.hazard(0.5, 0), ["mean_length=0", "(0, inf)"]),
        (lambda: stats.block_bootstrap([1.0, NAN, 2.0], 1), ["values[1]=nan", "finite"]),
        (lambda: stats.block_bootstrap([1.0, 2.0], 2), ["blocks=2", "2 values"]),
        (lambda: stats.block_bootstrap([1.0, 2.0], 0), ["blocks=0", "1"]),
        (lambda: stats.block_bootstrap([1.0, 2.0], ["a", "a"]), ["blocks", "1", "2"]),
        (lambda: stats.block_bootstrap([1.0, 2.0], 1, n_resamples=0), ["n_resamples=0", "1"]),
        (lambda: stats.block_bootstrap([1.0, 2.0], 1, seed=-1), ["seed=-1", "0"]),
        (lambda: stats.kl_beyond_control(NAN, 0.1), ["lower=nan"]),
        (lambda: stats.kl_beyond_control(0.1, -0.1), ["control=-0.1", "[0, inf)"]),
        (lambda: verdict(6, 5, 10, 6), ["b + c=11", "n=10"]),
        (lambda: verdict(6, 1, 10, 5), ["correct_a=5", "6"]),
        (lambda: verdict(1, 6, 10, 5), ["correct_a=5", "4"]),
        (lambda: verdict(1, 1, 10, 5, margin=0), ["margin=0", "1e-06"]),
        (lambda: verdict(1, 1, 10, 5, margin=NAN), ["margin=nan"]),
        (lambda: verdict(1, 1, 10, 5, chance=1.0), ["chance=1.0", "[0, 1)"]),
        (lambda: verdict(1, 1, 10, 5, task_size=9), ["task_size=9", "10"]),
        (lambda: verdict(1, 1, 10, 5, confidence=0), ["confidence=0", "(0, 1)"]),
    ],
)
def test_bad_values(call: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: stats.mcnemar_exact(1.5, 2), "b=1.5"),  # type: ignore[arg-type]
        (lambda: stats.mcnemar_exact(True, 2), "b=True"),
        (lambda: stats.hazard("0.5", 2), "share_identical='0.5'"),  # type: ignore[arg-type]
        (lambda: stats.clustered_se(["x"], "a"), "x: numbers"),
        (lambda: verdict(1, 1, 10, 5, kl_alarm=1), "kl_alarm=1"),  # type: ignore[arg-type]
    ],
)
def test_bad_types(call: Callable[[], object], word: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert word in str(caught.value)


def test_numpy_counts_are_taken() -> None:
    flips = np.array([1, -1, 1, 0, 0, 0, 0, 0, 0, 0])
    b, c = (flips == 1).sum(), (flips == -1).sum()
    assert tango_interval(b, c, flips.size) == tango_interval(2, 1, 10)
    assert verdict(b, c, flips.size, 9, kl_alarm=bool(np.bool_(False))) == verdict(2, 1, 10, 9)


def test_is_there_when_asked_for() -> None:
    assert qkv.stats is stats and "stats" in qkv.__all__
    with pytest.raises(AttributeError, match="no attribute 'statistics'"):
        qkv.statistics  # noqa: B018
