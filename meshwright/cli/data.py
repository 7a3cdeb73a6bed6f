"""`meshwright data`: files that jobs read, made from what people have."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from meshwright.cli.options import AsJson
from meshwright.errors import InputError

data = typer.Typer(help="Make the files that jobs read.", no_args_is_help=True)


@data.command()
def tokens(
    texts: Annotated[Path, typer.Argument(metavar="TEXTS", help="A folder of text files.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, which data.root then names.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|FILE", help="Bytes, or a tokenizer.json of the package tokenizers.")
    ] = "bytes",
    validation: Annotated[float, typer.Option(metavar="SHARE", help="Of the tokens, for evaluation.")] = 0.01,
    damaged: Annotated[
        str, typer.Option(metavar="fatal|skip", help="What becomes of a text that cannot be read.")
    ] = "fatal",
    as_json: AsJson = False,
) -> None:
    """Turn a folder of texts into the token files of the jobs gpt and bert."""
    from meshwright.workloads.text.token_build import build_tokens

    if damaged not in ("fatal", "skip"):
        raise InputError(f"--damaged {damaged}: write fatal or skip")
    made = build_tokens(texts, out, tokenizer, validation, cast(Literal["fatal", "skip"], damaged))
    if as_json:
        print(json.dumps({"folder": str(out), "splits": {name: asdict(about) for name, about in made.items()}}))
        return
    for name, about in made.items():
        print(f"{out / name}.bin: {about.count:,} tokens of {about.vocabulary:,} ({about.tokenizer})", flush=True)


@data.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of token files.")], as_json: AsJson = False
) -> None:
    """Read token files whole, and compare them with the checksums that they were built with."""
    from meshwright.workloads.text.token_file import splits_in, verify_tokens

    found = {split: verify_tokens(folder, split) for split in splits_in(folder)}
    if as_json:
        print(json.dumps({"folder": str(folder), "tokens": found}), flush=True)
        return
    for split, count in found.items():
        print(f"{folder / split}.bin: {count:,} tokens, as they were built", flush=True)
