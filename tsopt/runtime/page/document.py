"""How a page is made: templates, what is in it beside them, and what a browser may do with it.

A page loads nothing: its Content-Security-Policy allows one style sheet and one script, which are part of it.
Everything that comes from a model is escaped; the script reads it as data.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from html import escape
from typing import Any

from tsopt.runtime.untrusted_text import printable

STYLES = ("page.css", "uPlot.min.css")
LIBRARIES = ("dagre", "uPlot")  # from the npm registry, by `make vendor`
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)  # which is not in the page
WIDE = 600  # pixels of a page in a notebook


def render(template: str, scripts: tuple[str, ...], **values: Any) -> str:
    """The page that a template makes of these values, with the style sheet and these scripts in it."""
    style, script = "".join(map(_asset, STYLES)), "".join(map(_script, scripts))
    found = _environment().get_template(template)
    return str(found.render(style=style, script=script, policy=_policy(style, script), **values))


def framed(page: str, title: str) -> str:
    """A page in a frame of its own, for the output of a cell in a notebook, which it has no access to."""
    # NOTE: escaped, and nothing else: the page names the hashes of its scripts, and dagre has control characters.
    return (
        f'<iframe sandbox="allow-scripts" title="{escape(title)}" width="100%" height="{WIDE}" srcdoc="{escape(page)}">'
        "</iframe>"
    )


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("tsopt", "runtime/page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )


@cache
def _asset(name: str) -> str:
    found: str = _environment().loader.get_source(_environment(), name)[0]
    return found


@cache
def _script(name: str) -> str:
    """A script of our own in a scope of its own; one of a library after its licence, which every copy has to have."""
    text = _SOURCE_MAP.sub("", _asset(name))
    library = name.partition(".")[0]
    if library in LIBRARIES:
        return f"/*!\n{_asset(f'{library}.LICENSE')}*/\n{text}"
    return f"(() => {{\n{text}}})();\n"


def _policy(style: str, script: str) -> str:
    """The Content-Security-Policy: what is in the page, and nothing else."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    scripts = f" script-src {digest(script)};" if script else ""
    return f"default-src 'none'; style-src {digest(style)};{scripts} base-uri 'none'; form-action 'none'"
