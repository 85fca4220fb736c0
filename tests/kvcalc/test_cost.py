"""The arithmetic of cost: published rows exactly, intervals, the load curve, and machines for a demand."""

from pathlib import Path

import pytest

from servekit.kvcalc.cost import (
    BindingLimit,
    Demand,
    Estimate,
    MachineLimits,
    Rate,
    Split,
    break_even,
    costs,
    estimate,
    load_curve,
    money,
    plan_machines,
    token_cost,
    watt_hours,
)
from servekit.kvcalc.energy import EnergyReading, read_energy


@pytest.mark.parametrize(
    ("tokens_per_second", "seconds"), [(58.0, 17241), (709.7, 1409), (78.45, 12747), (188.5, 5305), (60.9, 16420)]
)
def test_published_machine_seconds(tokens_per_second: float, seconds: int) -> None:
    assert round(token_cost(Estimate(tokens_per_second)).seconds) == seconds


def test_machines_are_paid_for_as_a_whole() -> None:
    assert token_cost(Estimate(100.0), machines=8).seconds == 80_000


def test_the_interval_is_student_s() -> None:
    found = estimate([9.0, 10.0, 11.0])

    half = 4.303 / 3**0.5  # the standard deviation is 1
    assert (found.mean, found.count) == (10.0, 3)
    assert [found.low, found.high] == pytest.approx([10 - half, 10 + half])
    cost = token_cost(found)
    assert [cost.low, cost.high] == pytest.approx([1e6 / (10 + half), 1e6 / (10 - half)])


def test_one_measurement_has_no_interval() -> None:
    assert estimate([7.0]) == Estimate(7.0)
    assert token_cost(Estimate(7.0)).low is None


def test_an_interval_down_to_zero_has_no_upper_bound() -> None:
    cost = token_cost(estimate([1.0, 20.0]))

    assert cost.low is not None
    assert cost.high is None


def test_many_repeats_use_the_normal_quantile() -> None:
    found = estimate([1.0, 3.0] * 50)

    assert found.high is not None
    assert found.high - found.mean == pytest.approx(1.96 * (100 / 99) ** 0.5 / 10)


def test_money_and_energy() -> None:
    assert money(7200, 2.5) == 5.0
    assert watt_hours(7200, 300) == 600.0


RATE = Rate(
    output=Estimate(100.0), input=Estimate(400.0), cached=Estimate(100.0), total=Estimate(500.0), good=Estimate(80.0)
)


def test_every_kind_of_token() -> None:
    found = costs(RATE, split=Split(0.25, "measured"))

    assert found.output.seconds == 10_000
    assert found.total is not None
    assert found.total.seconds == 2_000
    assert found.good is not None
    assert found.good.seconds == 12_500
    assert found.prefill is not None
    assert found.prefill.seconds == 0.25 * 1e6 / 400
    assert found.decode is not None
    assert found.decode.seconds == 0.75 * 1e6 / 100
    assert found.cached is not None
    assert found.cached.seconds == 0
    assert found.prompt is not None
    assert found.prompt.seconds == 0.25 * 1e6 / 500


def test_the_split_accounts_for_all_the_time() -> None:
    found = costs(RATE, split=Split(0.37, "measured"))

    assert found.prefill is not None
    assert found.decode is not None
    second = 400 * found.prefill.seconds / 1e6 + 100 * found.decode.seconds / 1e6
    assert second == pytest.approx(1.0)


def test_what_was_not_measured_is_not_priced() -> None:
    found = costs(Rate(output=Estimate(100.0), good=Estimate(0.0)))

    assert [found.total, found.good, found.prefill, found.decode, found.cached, found.prompt] == [None] * 6


def test_the_curve_goes_through_the_measured_rates() -> None:
    curve = load_curve([(1.0, 50.0), (2.0, 90.0), (4.0, 100.0)], 4.0, [0.1, 0.25, 0.5, 0.75, 1.0])

    assert [point.output_tokens_per_s for point in curve] == pytest.approx([20.0, 50.0, 90.0, 95.0, 100.0])
    assert [point.is_measured for point in curve] == [False, True, True, False, True]
    assert curve[0].seconds_per_million == 50_000
    assert [point.requests_per_s for point in curve] == pytest.approx([0.4, 1.0, 2.0, 3.0, 4.0])


DEMAND = Demand(requests_per_day=864_000, prompt_tokens=500, output_tokens=200, peak_factor=2.0)


def test_machines_for_the_peak_and_one_to_spare() -> None:
    plan = plan_machines(DEMAND, MachineLimits(compute=6.0, kv=9.0, slots=7.0, latency=4.0))

    assert (DEMAND.mean_rate, DEMAND.peak_rate) == (10.0, 20.0)
    assert (plan.needed, plan.spare, plan.machines) == (5, 1, 6)
    assert plan.binding is BindingLimit.LATENCY
    assert plan.mean_utilisation == 0.5
    assert plan.peak_utilisation == 1.0


@pytest.mark.parametrize(
    ("limits", "binding"),
    [
        (MachineLimits(compute=3.0, kv=2.0), BindingLimit.KV),
        (MachineLimits(compute=3.0, slots=1.0), BindingLimit.SLOTS),
        (MachineLimits(compute=3.0), BindingLimit.COMPUTE),
    ],
)
def test_the_binding_limit(limits: MachineLimits, binding: BindingLimit) -> None:
    assert plan_machines(DEMAND, limits).binding is binding


def test_a_trickle_still_needs_a_machine() -> None:
    plan = plan_machines(Demand(1, 10, 10), MachineLimits(compute=100.0), spare=0)

    assert plan.machines == 1


def test_break_even_with_an_api() -> None:
    plan = plan_machines(DEMAND, MachineLimits(compute=4.0))

    found = break_even(DEMAND, plan, price_per_hour=2.0, api_price_in=0.5, api_price_out=1.5)

    assert found.own_per_day == 6 * 24 * 2.0
    assert found.api_per_request == pytest.approx((500 * 0.5 + 200 * 1.5) / 1e6)
    assert found.api_per_day == pytest.approx(864_000 * found.api_per_request)
    assert found.requests_per_day * found.api_per_request == pytest.approx(found.own_per_day)
    assert found.servable_per_day == pytest.approx(5 * 4.0 * 86_400 / 2)
    assert found.own_is_cheaper == (found.own_per_day < found.api_per_day)


def test_energy_counters_wrap(tmp_path: Path) -> None:
    before = EnergyReading({"a": 90.0, "b": 5.0, "only-before": 1.0}, {"a": 100.0})
    after = EnergyReading({"a": 10.0, "b": 7.0}, {"a": 100.0})

    assert after.since(before) == 22.0
    assert after.since(EnergyReading({}, {})) is None


def test_rapl_packages_are_read_and_their_parts_are_not(tmp_path: Path) -> None:
    for name, used in (("intel-rapl:0", "5000000"), ("intel-rapl:0:0", "1000000"), ("intel-rapl:1", "secret")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "energy_uj").write_text(f"{used}\n", encoding="utf-8")
        (folder / "max_energy_range_uj").write_text("9000000\n", encoding="utf-8")

    found = read_energy(tmp_path)

    assert found.joules["intel-rapl:0"] == 5.0
    assert found.wraps["intel-rapl:0"] == 9.0
    assert not {"intel-rapl:0:0", "intel-rapl:1"} & found.joules.keys()
