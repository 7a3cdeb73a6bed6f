"""Peers train the same batches as we do, in alternating rounds. Those that are missing, that fail, or whose loss is
wrong are named, and do not count."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster.catalog import find_link
from meshwright.cluster.cluster import Cluster, Device, Node
from meshwright.data.batch import LoadingOptions, SampleShare
from meshwright.data.loading import train_batches
from meshwright.errors import InputError, MeshwrightError, Stopped
from meshwright.job import Job, parse_job
from tests.cli.commands import JOB
from validation.bench.peers import catalog, compare
from validation.bench.peers.catalog import PEERS, Interpreter, find_interpreter, selected_peers
from validation.bench.peers.compare import job_of_steps, measure_rounds, peer_threads, rate_after_warm_up
from validation.bench.peers.ranks import RankCommand, run_ranks
from validation.bench.peers.rows import Contestant, Measurement, PeerReport, make_rows, report_lines
from validation.bench.peers.task import WARM_UP_STEPS, PeerTask, sample_order

OURS, DDP = Contestant("meshwright", "plan: auto", "replicate 2"), Contestant("plain DDP", "defaults", "torch 2.13.0")
FABRIC = Contestant("Lightning Fabric", "defaults", "lightning 2.6.6")
TORCH_ONLY = Interpreter(Path(sys.executable), {"torch": "2.13.0"})


def _job(**changes: Any) -> Job:
    return parse_job({**JOB, **changes})


def _cluster(devices: int) -> Cluster:
    device = Device(
        name="core", kind="cpu", memory_bytes=2**32, bandwidth_bytes_per_s=1e10, rates={"fp32": 1e11}, sources={}
    )
    node = Node(device=device, count=devices, link=find_link("Loopback"), cores=2)
    return Cluster(name=f"{devices}xcpu", nodes=(node,), based_on="measured")


def _report(measured: dict[Contestant, list[Measurement]], left_out: dict[str, str] | None = None) -> PeerReport:
    return PeerReport(
        rows=make_rows(measured, OURS, DDP, 0.05),
        left_out=left_out or {},
        ours=OURS,
        tolerance=0.05,
        first_loss=2.3,
        final_loss=measured[OURS][-1].final_loss,
        ranks=2,
        steps=60,
        precision="fp32",
        versions={"torch": "2.13.0"},
    )


RECORDED = {
    OURS: [Measurement(300.0, 0.5), Measurement(330.0, 0.5), Measurement(240.0, 0.5)],
    DDP: [Measurement(200.0, 0.5, 2.3), Measurement(200.0, 0.51, 2.3), Measurement(200.0, 0.5, 2.3)],
    FABRIC: [Measurement(100.0, 0.5, 2.3), Measurement(220.0, 0.49, 2.3), Measurement(180.0, 0.5, 2.3)],
}


def test_ratios_are_taken_round_by_round() -> None:
    rows = _report(RECORDED).rows
    assert [(row.name, row.ratio, row.spread) for row in rows] == [
        ("meshwright", 1.5, (1.2, 1.65)),
        ("plain DDP", 1.0, (1.0, 1.0)),
        ("Lightning Fabric", 0.9, (0.5, 1.1)),
    ]
    assert all(row.is_ranked and row.rounds == 3 for row in rows)


def test_the_table_and_the_json_have_every_contestant() -> None:
    report = _report(RECORDED, {"DeepSpeed": "deepspeed is not installed"})
    lines = report_lines(report)
    assert lines[0].startswith("2 ranks, fp32, 60 steps; ratios of samples/s to plain DDP at its defaults; torch 2.13")
    assert lines[1].split()[:4] == ["meshwright", "plan:", "auto", "ratio"]
    assert "1.500 (1.200 to 1.650, 3 rounds)" in lines[1]
    assert lines[-1] == "DeepSpeed: left out: deepspeed is not installed"
    assert len(lines) == 5
    result = json.loads(json.dumps(report.to_json()))
    assert [row["name"] for row in result["rows"]] == ["meshwright", "plain DDP", "Lightning Fabric"]
    assert result["left_out"] == {"DeepSpeed": "deepspeed is not installed"}
    assert result["summary"] == {
        "ours_to_ddp": 1.5,
        "fastest_at_defaults": "plain DDP",
        "ours_to_fastest_at_defaults": 1.5,
        "fastest_at_best": None,
        "ours_to_fastest_at_best": None,
    }


@pytest.mark.parametrize(
    ("loss", "marked"),
    [(2.3, "not ranked: 360.0% from our loss 0.5000, tolerance 5%"), (float("nan"), "not ranked: ours is 0.5000")],
)
def test_a_peer_whose_loss_is_wrong_is_marked_and_not_ranked(loss: float, marked: str) -> None:
    """One wrong round is enough, and the fastest peer is another one then."""
    fast = [Measurement(900.0, 0.5, 2.3), Measurement(900.0, loss, 2.3), Measurement(900.0, 0.5, 2.3)]
    report = _report({**RECORDED, FABRIC: fast})
    assert [(row.name, row.is_ranked) for row in report.rows][-1] == ("Lightning Fabric", False)
    assert report_lines(report)[-1].endswith(marked)
    assert report.summary()["fastest_at_defaults"] == "plain DDP"
    json.dumps(report.to_json(), allow_nan=False)


def test_a_job_that_learns_too_little_to_check_losses_is_reported() -> None:
    slow = replace(_report(RECORDED), first_loss=0.51)
    assert "raise --steps" in report_lines(slow)[-1]
    assert "raise --steps" not in "\n".join(report_lines(_report(RECORDED)))


def test_a_missing_peer_is_left_out_with_the_command_that_installs_it() -> None:
    missing = {peer.name: TORCH_ONLY.missing(peer) for peer in PEERS}
    assert missing["ddp"] is None
    assert missing["fsdp2"] is None
    assert missing["deepspeed"] == f"deepspeed is not installed for {sys.executable}; install it with: make peers"
    other = Interpreter(Path("/opt/python"), {"torch": "2.13.0"})
    assert str(other.missing(PEERS[2])).endswith("install it with: /opt/python -m pip install lightning")


def test_without_the_peers_environment_our_own_interpreter_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    interpreter = find_interpreter(None)
    assert interpreter.python == Path(sys.executable)
    assert "torch" in interpreter.versions


def test_an_interpreter_that_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--python .*nowhere: this is no Python interpreter that can be run"):
        find_interpreter(tmp_path / "nowhere")


def test_an_interpreter_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_installed_versions", lambda *_: {"accelerate": "1.15.0"})
    with pytest.raises(InputError, match=r"--python python9: torch is not installed for it"):
        find_interpreter(Path("python9"))


def test_peers_are_chosen_by_name_and_ddp_is_always_there() -> None:
    assert selected_peers(None) == PEERS
    assert [peer.name for peer in selected_peers("fsdp2, fabric")] == ["ddp", "fabric", "fsdp2"]
    with pytest.raises(InputError, match="there is no peer 'fabrik': did you mean 'fabric'"):
        selected_peers("fabrik")


def test_rounds_alternate_and_a_peer_that_fails_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def run(contestant: Contestant) -> Measurement:
        ran.append(contestant.name)
        if contestant is FABRIC and ran.count(contestant.name) == 2:
            raise MeshwrightError("RuntimeError: out of memory")
        return Measurement(100.0, 0.5, 2.3)

    left_out: dict[str, str] = {}
    runs = {contestant: lambda contestant=contestant: run(contestant) for contestant in (OURS, DDP, FABRIC)}
    measured = measure_rounds(runs, 3, (OURS, DDP), left_out)
    forward = ["meshwright", "plain DDP", "Lightning Fabric"]
    assert ran == [*forward, *forward[::-1], *forward[:2]]
    assert {contestant.name: len(made) for contestant, made in measured.items()} == {"meshwright": 3, "plain DDP": 3}
    assert left_out == {"Lightning Fabric, defaults": "failed: RuntimeError: out of memory"}
    assert "round 2 of 3: plain DDP, defaults" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MeshwrightError, Stopped])
def test_the_benchmark_ends_if_the_reference_fails_or_the_user_stops_it(error: type[MeshwrightError]) -> None:
    def fail() -> Measurement:
        raise error("rank 1 failed")

    with pytest.raises(error, match="rank 1 failed"):
        measure_rounds({DDP: fail}, 1, (DDP,), {})


def test_the_rank_that_fails_is_quoted_in_one_line() -> None:
    """The first rank fails at once, the script has too few arguments."""
    command = RankCommand(Path(sys.executable), "validation.bench.peers.ranks_of_nothing", [], 1, 1, 60)
    with pytest.raises(
        MeshwrightError, match=r"^\S*python\S*: No module named validation.bench.peers.ranks_of_nothing"
    ):
        run_ranks(command)


def test_ranks_that_take_too_long_are_ended() -> None:
    command = RankCommand(Path(sys.executable), "timeit", ["-n", "1", "import time; time.sleep(600)"], 1, 1, 0.1)
    with pytest.raises(MeshwrightError, match=r"not done after 0\.1 s: set train\.timeout_s"):
        run_ranks(command)


def test_a_peer_visits_the_samples_that_our_ranks_visit() -> None:
    data = list(range(50))
    batches = train_batches(
        data, seed=3, global_batch=15, share=SampleShare(), loading=LoadingOptions(), epochs=2, drop_last=True
    )
    ours = [sample for batch in batches for part in batch.microbatches for sample in part.data.tolist()]
    assert sample_order(3, 50, 15, 5).tolist() == ours[: 5 * 15]


def test_a_peer_gets_the_jobs_model_data_and_optimizer() -> None:
    task = PeerTask(_job(), 3, False, "fp32", "cpu")
    batches = list(task.loader(2))
    assert len(batches) == 2 * (3 + WARM_UP_STEPS)  # not yet divided among ranks
    model = task.model()
    loss = task.loss(model, batches[0])
    loss.backward()
    task.optimizer(model).step()
    assert task.loss(model, batches[0]).item() < loss.item()


def test_only_at_its_best_a_peer_has_a_fused_optimizer() -> None:
    task = PeerTask(_job(), 3, True, "fp32", "cpu")
    assert task.optimizer(task.model()).param_groups[0]["fused"] is True
    assert not replace(task, is_best=False).optimizer(task.model()).param_groups[0]["fused"]


def test_the_measured_job_has_no_schedule_evaluation_or_checkpoint(tmp_path: Path) -> None:
    job = job_of_steps(_job(), 65, tmp_path)
    assert job.log.every_steps == WARM_UP_STEPS
    assert (job.train.steps, job.train.epochs, job.schedule, job.data.eval) == (65, None, None, None)
    assert job.checkpoint.every_steps is None
    with pytest.raises(InputError, match=r"data\.partition is sample"):
        job_of_steps(_job(data={**JOB["data"], "partition": "sample"}), 65, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"epochs": 1, "global_batch": 31}}, "global_batch is 31, which 2 ranks cannot divide evenly"),
        ({"train": {"epochs": 1, "global_batch": 10**6}}, r"but data\.train has \d+ samples"),
    ],
)
def test_a_batch_that_peers_cannot_divide_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare.compare(_job(**changes), _cluster(2), PEERS, TORCH_ONLY, precision="fp32", steps=2, rounds=1)


def test_peers_have_torchruns_threads_at_their_defaults_and_all_cores_at_their_best() -> None:
    assert peer_threads("defaults", 2, 16) == 1
    assert peer_threads("best", 2, 16) == 8
    assert peer_threads("defaults", 1, 16) == 16


def test_the_first_steps_of_our_runs_are_not_timed() -> None:
    """The steps after the warm-up: 5 at 100 samples per second, and 2 at 50."""
    rates = {WARM_UP_STEPS: 1.0, 2 * WARM_UP_STEPS: 100.0, 2 * WARM_UP_STEPS + 2: 50.0}
    entries = [{"kind": "train", "step": step, "samples_per_s": rate} for step, rate in rates.items()]
    rate = rate_after_warm_up([*entries, {"kind": "eval", "step": 2 * WARM_UP_STEPS + 2}])
    assert rate == pytest.approx((WARM_UP_STEPS + 2) / (WARM_UP_STEPS / 100 + 2 / 50))


@pytest.mark.soak
def test_every_installed_peer_trains_as_we_do() -> None:
    """Plain DDP and FSDP2 need only torch, so they always run; the others run if `make peers` has installed them."""
    interpreter = find_interpreter(None)
    report = compare.compare(_job(), _cluster(2), PEERS, interpreter, precision="fp32", steps=3, rounds=1)
    installed = {peer.title for peer in PEERS if interpreter.missing(peer) is None}
    assert installed >= {"plain DDP", "FSDP2 + compile"}
    assert {(row.name, row.settings) for row in report.rows if row.is_ranked} == {
        ("meshwright", "plan: auto"),
        *((name, settings) for name in installed for settings in ("defaults", "best")),
    }
    assert set(report.left_out) == {peer.title for peer in PEERS} - installed
