"""Answers to questions agree with single plans that are asked for one by one."""

from dataclasses import replace

import pytest

from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.numbers.units import duration_text, number_text
from meshwright.plan import Plan
from meshwright.plan_fields.quantities import read_count
from meshwright.planner.explanation.report import predict_given_plan
from meshwright.planner.offload import search_with_offload
from meshwright.planner.questions.answer import Answer
from meshwright.planner.questions.bottleneck import Loading, answer_bottleneck, arithmetic_share, refusal
from meshwright.planner.questions.differences import explain_difference
from meshwright.planner.questions.goals import Limits, best_cluster, read_clusters, read_duration
from meshwright.planner.questions.largest_batch import largest_batches, largest_samples
from meshwright.planner.questions.sweep import stops_paying, sweep, sweep_points
from meshwright.planner.questions.variations import changed, read_sweep, varied
from meshwright.report.page import render
from meshwright.report.question_page import question_page
from tests.planner.constraints.test_constraints import inputs_of, layers, tiny_decoder


def check_page(answer: Answer) -> None:
    """Checks that the answer can be drawn."""
    assert "</html>" in render(question_page({**answer.to_dict(), "title": "job"}))


def test_a_sweep_agrees_with_single_plans() -> None:
    inputs = inputs_of("2xA100-80GB", 16, epoch_samples=1000)
    inputs = replace(inputs, cluster=inputs.cluster.model_copy(update={"price_per_hour": 4.0}))
    answer = sweep("devices", ["1", "2"], inputs, tiny_decoder())
    for row in answer.values["rows"]:
        name = f"{row['devices']}xA100-80GB" if row["devices"] > 1 else "A100-80GB"
        single = search_with_offload(replace(inputs, cluster=find_cluster(name)), tiny_decoder()).ranked[0]
        assert (row["step_s"], row["summary"]) == (single.prediction.step_s, single.plan.summary())
        assert row["price_per_hour"] == 2.0 * row["devices"]
        assert row["epoch_cost"] == pytest.approx(63 * row["step_s"] / 3600 * row["price_per_hour"])
        tokens_per_s = 16 * 128 / row["step_s"]
        assert row["billion_tokens_cost"] == pytest.approx(1e9 / tokens_per_s / 3600 * row["price_per_hour"])
    first, second = answer.values["rows"]
    assert first["efficiency"] == 1.0
    assert second["efficiency"] == pytest.approx(first["step_s"] / second["step_s"] / 2)
    check_page(answer)


def test_a_sweep_is_repeated_with_changes() -> None:
    inputs = inputs_of("2xA100-80GB", 16)
    answer = sweep("devices", ["1", "2"], inputs, layers(), ["compute=2x"])
    (changes,) = answer.values["what_if"]
    assert changes["change"] == "compute=2x"
    faster = replace(inputs, cluster=changed(inputs.cluster, "compute=2x"))
    single = search_with_offload(faster, layers()).ranked[0]
    row, without = changes["rows"][1], answer.values["rows"][1]
    # Launches limit this step, which faster devices do not shorten.
    assert row["step_s"] == single.prediction.step_s <= without["step_s"]
    assert row["plan"] == single.plan.model_dump(mode="json")
    assert row["cluster"] == "2xA100-80GB with compute=2x"
    check_page(answer)


def test_scaling_stops_paying_where_devices_add_less_than_half() -> None:
    points, _ = sweep_points("devices", ["1", "2"], inputs_of("2xA100-80GB", 16), layers())
    gain = points[1].samples_per_s / points[0].samples_per_s - 1
    assert (stops_paying(points) is None) == (gain >= 0.5)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("devices=8..64", ["8", "16", "32", "64"]),
        ("devices=8..64:24", ["8", "32", "56"]),
        ("batch=4,6,4", ["4", "6"]),
        ("link=200G,400G", ["200G", "400G"]),
        ("gpu=A100-80GB,H100", ["A100-80GB", "H100"]),
    ],
)
def test_what_a_sweep_varies(word: str, values: list[str]) -> None:
    assert read_sweep(word) == (word.partition("=")[0], values)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("device=8..64", "'device' cannot be varied: did you mean 'devices'?"),
        ("devices", "write devices=8..1024"),
        ("devices=64..8", "64 is larger than 8"),
        ("devices=a..8", "no range of devices"),
        ("batch=0", "'0' is no number above 0"),
        ("gpu=A100..H100", "no range of gpu"),
        ("devices=1..1000:1", "more than 40 values"),
        ("devices=", "there are no values"),
    ],
)
def test_wrong_sweeps(word: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_sweep(word)
    assert message in str(error.value)


def test_clusters_are_varied_and_changed() -> None:
    inputs = inputs_of("2x8xA100-80GB", 64)
    assert varied(inputs, "devices", "4").cluster.device_count == 4
    assert varied(inputs, "nodes", "3").cluster.device_count == 24
    assert varied(inputs, "batch", "8").global_batch == 8
    assert varied(inputs, "gpu", "H100").cluster == find_cluster("2x8xH100")
    network = varied(inputs, "link", "400G").cluster.link
    assert network is not None
    assert network.bandwidth_bytes_per_s == 50e9
    assert inputs.cluster.link is not None
    faster = changed(inputs.cluster, "link=2x")
    assert faster.link is not None
    assert faster.link.bandwidth_bytes_per_s == 2 * inputs.cluster.link.bandwidth_bytes_per_s
    assert faster.nodes == inputs.cluster.nodes
    assert changed(inputs.cluster, "memory=141GB").nodes[0].device.memory_bytes == 141e9
    with pytest.raises(InputError, match="12 devices are no whole machines of 8"):
        varied(inputs, "devices", "12")
    for wrong in ("link=fast", "speed=2x", "link"):
        with pytest.raises(InputError, match="what-if"):
            changed(inputs.cluster, wrong)


@pytest.mark.parametrize("largest", [0, 1, 5, 8, 999, 1000, 2000])
@pytest.mark.parametrize("power", [0.1, 1, 3])
@pytest.mark.parametrize("step", [1, 64])
def test_the_largest_number_that_fits_is_found(largest: int, power: float, step: int) -> None:
    def needed_bytes(samples: int) -> int:
        return int(1e6 + 1e3 * (samples // step * step) ** power)

    found = largest_samples(needed_bytes, needed_bytes(largest) if largest else 0, 1000)
    fitting = [samples for samples in range(1, 1001) if largest and needed_bytes(samples) <= needed_bytes(largest)]
    assert found == max(fitting, default=0)


def test_a_larger_batch_than_the_largest_does_not_fit() -> None:
    inputs = replace(inputs_of("2xA100-80GB", 4), memory_margin=0.95)
    batches = largest_batches(search_with_offload(inputs, tiny_decoder()), inputs, tiny_decoder())
    speeds = [batch.samples_per_s for batch in batches]
    assert speeds == sorted(speeds, reverse=True)
    best = batches[0]
    for batch, fits in ((best.global_batch, True), (best.global_batch + best.plan.batch_parts, False)):
        single = predict_given_plan(best.plan, replace(inputs, global_batch=batch), tiny_decoder()).ranked[0][1]
        assert (single.memory.device_bytes <= inputs.capacity_bytes) == fits


@pytest.mark.soak
def test_the_best_cluster_is_within_the_limits() -> None:
    clusters = read_clusters("A100-80GB=2,4xA100-80GB=8,4xH100=40")
    inputs = inputs_of("4xA100-80GB", 16)
    answers = {goal: best_cluster(goal, clusters, 1000, Limits(), inputs, layers()) for goal in ("cost", "devices")}
    rows = answers["cost"].values["rows"]
    assert answers["cost"].values["best"] == min(rows, key=lambda row: row["run_cost"])
    assert answers["devices"].values["best"]["devices"] == 1
    for row in rows:
        assert row["run_s"] == 1000 * row["step_s"]
        assert row["run_cost"] == pytest.approx(row["run_s"] / 3600 * row["price_per_hour"])
    deadline = sorted(row["run_s"] for row in rows)[0]
    limited = best_cluster("devices", clusters, 1000, Limits(deadline), inputs, layers())
    assert limited.values["best"]["run_s"] == deadline
    none = best_cluster("time", clusters, 1000, Limits(deadline / 2), inputs, layers())
    assert none.values["best"] is None
    assert "None of the 3 clusters" in none.sentences[0]
    check_page(limited)
    with pytest.raises(InputError, match="'A100-80GB' has no price"):
        best_cluster("cost", read_clusters("A100-80GB"), 10, Limits(), inputs, layers())


def test_durations_and_prices() -> None:
    assert [read_duration(text, "--deadline") for text in ("3d", "12h", "90min", "1.5s")] == [259200, 43200, 5400, 1.5]
    assert [duration_text(value) for value in (259200, 7200, 130, 0.5)] == ["3 d", "2 h", "2.17 min", "500 ms"]
    assert [number_text(value) for value in (None, 1234.5, 1.234)] == ["–", "1,234", "1.23"]
    for wrong in ("3", "3 years", "0d"):
        with pytest.raises(InputError, match="write a time such as 3d"):
            read_duration(wrong, "--deadline")
    with pytest.raises(InputError, match="the price of 8xH100 is 'x'"):
        read_clusters("8xH100=x")


def test_the_difference_of_two_plans_is_that_of_their_terms() -> None:
    inputs = inputs_of("4xA100-80GB", 16)
    plans = [
        Plan.model_validate({"axes": {axis: 4}, "numerics": {"precision": "bf16"}}) for axis in ("replicate", "tensor")
    ]
    answer = explain_difference(plans[0], plans[1], inputs, tiny_decoder())
    values = answer.values
    assert sum(row["difference_s"] for row in values["rows"]) == pytest.approx(
        values["second"]["step_s"] - values["first"]["step_s"]
    )
    assert values["fields"]["axes.tensor"] == [1, 4]
    assert "The second plan is faster by" in answer.sentences[0]
    check_page(answer)
    without_cuts = Plan.model_validate({"axes": {"pipeline": 4}, "pipeline": {"microbatches": 4}})
    found = explain_difference(plans[0], without_cuts, inputs, tiny_decoder()).values["fields"]["pipeline.cuts"]
    assert len(found[1]) == 3
    too_large = Plan.model_validate({"axes": {"replicate": 8}})
    with pytest.raises(InputError, match=r"the second plan cannot be run: .* is for 8 ranks"):
        explain_difference(plans[0], too_large, inputs, tiny_decoder())


def test_what_limits_a_job_and_what_would_help() -> None:
    inputs, profiles = inputs_of("4xA100-80GB", 16), layers()
    result = search_with_offload(inputs, profiles)
    answer = answer_bottleneck(result, inputs, profiles, Loading(10.0))
    assert answer.values["bottleneck"] == "loader"
    changes = answer.values["changes"]
    assert [change["change"][:22] for change in changes] == ["loading that keeps up:"]  # nothing else loads faster
    step_s = result.ranked[0].prediction.step_s
    assert changes[0]["speedup"] == pytest.approx(16 / 10.0 / step_s)
    assert Loading(10.0).wait_s(16, 0.5) == pytest.approx(1.1)
    assert Loading(10.0, is_first=True).wait_s(16, 0.5) == pytest.approx(1.6)
    assert len(answer.values["changes"]) <= 3
    assert sum(row["share"] for row in answer.values["rows"]) == pytest.approx(1)
    assert 0 <= arithmetic_share(result.summary.profile, inputs, 4) < 0.5  # small products
    assert refusal("no plan fits", inputs).values["runs"] is False
    check_page(answer)


@pytest.mark.parametrize("device", ["MI250X", "MI325X", "Gaudi3", "M1-Ultra"])
def test_devices_of_other_makers_are_planned_and_the_report_says_so(device: str) -> None:
    inputs = inputs_of(device, 16)
    report = predict_given_plan(Plan.model_validate({"numerics": {"precision": "bf16"}}), inputs, layers())
    assert report.ranked[0][1].step_s > 0
    assert f"published rates and links of the {device}" in " ".join(report.explanation)
    assert "Nothing of Meshwright has been run on" in " ".join(report.explanation)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1B", 10**9),
        ("1.5T", 15 * 10**11),
        ("300m", 3 * 10**8),
        ("10 k", 10_000),
        ("2 billion", 2 * 10**9),
        ("1e9", 10**9),
        ("1,000,000,000", 10**9),
        ("1_000", 1000),
        ("0.3B", 3 * 10**8),
        (" 7 ", 7),
    ],
)
def test_numbers_of_tokens_are_read_as_people_write_them(text: str, number: int) -> None:
    assert read_count(text, "--tokens") == number


@pytest.mark.parametrize("text", ["", "lots", "1Q", "-1B", "1,00", "1e", "1B2", "0", "1e99", "nan"])
def test_numbers_of_tokens_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^--tokens is '.*': write a number"):
        read_count(text, "--tokens")
