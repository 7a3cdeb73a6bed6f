"""`meshwright data`: builds and checks the data files that jobs read."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from meshwright.cli.options import AsJson
from meshwright.errors import InputError

data = typer.Typer(help="Build and check the data files that jobs read.", no_args_is_help=True)


@data.command()
def tokens(
    texts: Annotated[Path, typer.Argument(metavar="TEXTS", help="A folder of text files.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; set data.root to it.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|FILE", help="bytes, or a tokenizer.json of the package tokenizers.")
    ] = "bytes",
    validation: Annotated[
        float, typer.Option(metavar="SHARE", help="The share of the tokens that is kept for evaluation.")
    ] = 0.01,
    damaged: Annotated[
        str, typer.Option(metavar="fatal|skip", help="What to do with a text that cannot be read.")
    ] = "fatal",
    as_json: AsJson = False,
) -> None:
    """Build the token files of the jobs gpt and bert from a folder of texts."""
    from meshwright.workloads.text.token_build import build_tokens

    if damaged not in ("fatal", "skip"):
        raise InputError(f"--damaged {damaged}: write fatal or skip")
    splits = build_tokens(texts, out, tokenizer, validation, cast(Literal["fatal", "skip"], damaged))
    if as_json:
        print(json.dumps({"folder": str(out), "splits": {name: asdict(split) for name, split in splits.items()}}))
        return
    for name, split in splits.items():
        print(
            f"{out / name}.bin: {split.count:,} tokens, vocabulary {split.vocabulary:,} ({split.tokenizer})", flush=True
        )


@data.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of token files.")], as_json: AsJson = False
) -> None:
    """Read token files completely, and compare them with the checksums from when they were built."""
    from meshwright.workloads.text.token_file import splits_in, verify_tokens

    counts = {split: verify_tokens(folder, split) for split in splits_in(folder)}
    if as_json:
        print(json.dumps({"folder": str(folder), "tokens": counts}), flush=True)
        return
    for split, count in counts.items():
        print(f"{folder / split}.bin: {count:,} tokens, unchanged since they were built", flush=True)
