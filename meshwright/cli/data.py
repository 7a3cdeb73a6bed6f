"""`meshwright data`: builds and checks the data files that jobs read."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from meshwright.cli.options import AsJson, path_argument
from meshwright.errors import InputError
from meshwright.files.user_path import user_path

data = typer.Typer(help="Build and check the data files that jobs read.", no_args_is_help=True)


@data.command()
def tokens(
    texts: Annotated[Path, path_argument("TEXTS", "A folder of text files.")],
    out: Annotated[Path, path_argument("OUT", "The folder to write the files to; set data.root to it.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="bytes|FILE",
            help="bytes (each byte is a token), or a tokenizer.json file of the tokenizers package.",
        ),
    ] = "bytes",
    validation: Annotated[float, typer.Option(metavar="SHARE", help="The share of the tokens for evaluation.")] = 0.01,
    damaged: Annotated[
        str,
        typer.Option(
            metavar="fatal|skip", help="What to do with a line that is not UTF-8: stop with an error, or skip it."
        ),
    ] = "fatal",
    as_json: AsJson = False,
) -> None:
    """Build the token files for the jobs gpt and bert from a folder of texts."""
    from meshwright.workloads.text.token_build import build_tokens

    if damaged not in ("fatal", "skip"):
        raise InputError(f"--damaged {damaged}: write fatal or skip")
    tokenizer = tokenizer if tokenizer == "bytes" else str(user_path(tokenizer, "--tokenizer"))
    try:
        splits = build_tokens(texts, out, tokenizer, validation, cast(Literal["fatal", "skip"], damaged))
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror}") from None
    if as_json:
        print(json.dumps({"folder": str(out), "splits": {name: asdict(split) for name, split in splits.items()}}))
        return
    for name, split in splits.items():
        print(
            f"{out / name}.bin: {split.count:,} tokens, vocabulary {split.vocabulary:,} ({split.tokenizer})", flush=True
        )


@data.command()
def verify(
    folder: Annotated[Path, path_argument("FOLDER", "A folder of token files.")], as_json: AsJson = False
) -> None:
    """Read token files completely, and compare their checksums with those from when they were built."""
    from meshwright.workloads.text.token_file import splits_in, verify_tokens

    counts = {split: verify_tokens(folder, split) for split in splits_in(folder)}
    if as_json:
        print(json.dumps({"folder": str(folder), "tokens": counts}), flush=True)
        return
    for split, count in counts.items():
        print(f"{folder / split}.bin: {count:,} tokens, unchanged since they were built", flush=True)
