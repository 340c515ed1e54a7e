"""WikiText-2 (raw, test): text that is scored as it stands, for KL and perplexity."""

from __future__ import annotations

from .items import Task, read_text


def wikitext2() -> Task:
    """The whole test set as one text, byte for byte; `Task.windows` cuts it."""
    return Task(name="wikitext2", kind="text", text=lambda: read_text("wikitext2_test.txt.gz"))
