"""Hooks of mkdocs: pages of the site that are files outside of `docs/`, links out of `docs/`, and the few places where
GitHub reads Markdown differently from mkdocs."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
# Files of the repository that are pages of the site, by the path that they have there.
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "validation/report.md": "validation/report.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are outside of `docs/`."""
    for source, page in PAGES.items():
        text = (REPOSITORY / source).read_text()
        files.append(File.generated(config, page, content=adapt(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    if page.file.src_uri in PAGES.values():
        return markdown
    return adapt(markdown, f"docs/{page.file.src_uri}")


def adapt(markdown: str, source: str) -> str:
    """The text of a file of the repository as mkdocs needs it. Code blocks stay as they are."""
    parts = re.split(r"(^[ ]*```.*?^[ ]*```[ ]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else _adapt_text(part, source) for number, part in enumerate(parts))


def _adapt_text(text: str, source: str) -> str:
    lines: list[str] = []
    for line in text.split("\n"):
        if _LIST_ITEM.match(line) and lines and lines[-1].strip() and not _belongs_to_list(lines[-1]):
            lines.append("")  # GitHub begins a list right after a paragraph
        if line.startswith("|"):
            line = re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)
        lines.append(line)
    return _LINK.sub(lambda link: site_link(link, source), "\n".join(lines))


def _belongs_to_list(line: str) -> bool:
    return bool(_LIST_ITEM.match(line)) or line.startswith((" ", "\t"))


def site_link(link: re.Match[str], source: str) -> str:
    """A link of the file `source` as one of the site. A file that is no page of the site becomes its path as text."""
    image, words, target = link.groups()
    path, _, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return link[0]
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
    if page is None:
        return f"{words} (`{file}`)" if words.strip("`") != file else f"`{file}`"
    here = PAGES.get(source) or source.removeprefix("docs/")
    relative = posixpath.relpath(page, posixpath.dirname(here) or ".")
    return f"{image}[{words}]({relative}{'#' + anchor if anchor else ''})"


# The theme loads a script from the network that lets the search work on pages that are opened from the disk, where
# browsers start no workers. This one does the same: a frame takes the place of the worker.
_SHIM = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"></script>')
_FRAME_WORKER = """<script>
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.frame = frame.contentWindow;
      this.ready = new Promise(resolve => {
        const script = this.frame.document.createElement("script");
        this.frame.postMessage = data => this.answer(data);
        this.frame.importScripts = () => Promise.resolve();
        script.src = url;
        script.onload = resolve;
        this.frame.document.body.appendChild(script);
      });
    }
    answer(data) {
      const event = new MessageEvent("message", {data});
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
</script>"""


def on_post_page(output: str, page: Any, config: Any) -> str:
    return _SHIM.sub(lambda _: _FRAME_WORKER, output)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    return _SHIM.sub(lambda _: _FRAME_WORKER, output_content)
