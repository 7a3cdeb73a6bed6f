"""`meshwright data` makes token files and verifies their checksums."""

from pathlib import Path

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
