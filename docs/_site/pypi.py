"""What PyPI shows: the README, and links once the repository has an address.

hatchling calls this when it builds the package. `pyproject.toml` has the address.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RepositoryMetadata(MetadataHookInterface):
    """Fills in `readme` and `urls`, which `pyproject.toml` calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        address = self.config["repository"]
        metadata["urls"] = links(address) if address else {}
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_whole_links(text, address) if address else text,
        }


def links(address: str) -> dict[str, str]:
    return {
        "Source": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def with_whole_links(text: str, address: str) -> str:
    """The README with badges, and with links and pictures that lead there from PyPI."""
    ci = f"{address}/actions/workflows/ci.yml"
    pypi, shields = "https://pypi.org/project/optaxclip", "https://img.shields.io/pypi"
    badges = [
        f"[![CI]({ci}/badge.svg)]({ci})",
        f"[![PyPI]({shields}/v/optaxclip)]({pypi})",
        f"[![Python]({shields}/pyversions/optaxclip)]({pypi})",
    ]
    text = re.sub(r"\]\((?!https?:|#)", f"]({address}/blob/main/", text)
    text = re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{address}/raw/main/', text)
    title, _, rest = text.partition("\n")
    return "\n".join([title, "", *badges, rest])
