"""Keeps the name of the machine out of the results."""

from __future__ import annotations

from typing import Any


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """Medians and quartiles are kept, every single round is not."""
    for item in output_json["benchmarks"]:
        item["stats"].pop("data", None)
