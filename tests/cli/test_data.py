"""`meshwright data` makes token files and verifies their checksums."""

import sys
from pathlib import Path

import pytest

from meshwright.cli import main
from tests.cli.commands import RunCommand


def test_token_files_are_made_and_verified(tmp_path: Path, run_command: RunCommand) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("all the same words\n" * 5000)
    texts, out = str(tmp_path / "texts"), str(tmp_path / "tokens")
    created = run_command("data", "tokens", texts, out)
    assert "train.bin: " in created.stdout + created.stderr
    assert run_command("data", "verify", out).exit_code == 0
    with (tmp_path / "tokens" / "train.bin").open("r+b") as file:
        file.write(b"x")
    damaged = run_command("data", "verify", out)
    assert damaged.exit_code == 2
    assert damaged.stderr.startswith("meshwright: ")
    assert "train.bin: its checksum is" in damaged.stderr
    refused = run_command("data", "tokens", texts, out, "--damaged", "maybe")
    assert "--damaged maybe: write fatal or skip" in refused.stderr
    assert "there are no token files" in run_command("data", "verify", texts).stderr


def test_output_on_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    stream = Path("/dev/full").open("w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    words = ["meshwright", "data", "tokens", str(tmp_path), str(tmp_path / "out"), "--validation", "0", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    sys.stdout.close()  # main has replaced it
    assert end.value.code == 1
    line = "meshwright: the output of this command cannot be written: No space left on device\n"
    assert capsys.readouterr().err == line
    with pytest.raises(OSError, match="No space left"):
        stream.close()
