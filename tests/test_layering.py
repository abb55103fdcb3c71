"""Who may import whom, and where heavy libraries live.

cli, pytest_plugin -> sweeps, regression, dynamo, hybrid -> hybrid_state -> background -> api -> request ->
prepared, quantization -> transforms -> passes, runtime -> compiler -> errors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tsopt"
FILES = sorted(ROOT.rglob("*.py"))

# layer -> the layers that it may import; `root` is errors.py and _version.py.
MAY = {
    "root": {"root"},
    "compiler": {"compiler", "root"},
    "passes": {"passes", "compiler", "root"},
    "runtime": {"runtime", "compiler", "root"},
    "transforms": {"transforms", "passes", "runtime", "compiler", "root"},
    "quantization": {"quantization", "passes", "runtime", "compiler", "root"},
    "prepared": {"prepared", "transforms", "passes", "runtime", "compiler", "root"},
    "request": {"request", "prepared", "quantization", "transforms", "passes", "runtime", "compiler", "root"},
    "pipelines": {"pipelines", "root"},
    "originals": {"originals", "pipelines", "compiler", "root"},
    "api": {
        "api",
        "originals",
        "pipelines",
        "request",
        "quantization",
        "transforms",
        "passes",
        "runtime",
        "compiler",
        "root",
    },
    "sweeps": {"sweeps", "api", "runtime", "compiler", "root"},
    "regression": {"regression", "api", "runtime", "compiler", "root"},
    "dynamo": {"dynamo", "api", "runtime", "compiler", "root"},
    "background": {"background", "api", "runtime", "compiler", "root"},
    "hybrid_counts": {"hybrid_counts", "background", "runtime", "compiler"},
    "hybrid_choice": {"hybrid_choice", "hybrid_counts", "background", "runtime", "compiler"},
    "hybrid_state": {"hybrid_state", "hybrid_choice", "background", "api", "runtime", "compiler", "root"},
    "hybrid": {"hybrid", "originals", "pipelines", "hybrid_state", "background", "runtime", "compiler", "root"},
    "pytest_plugin": {"pytest_plugin", "regression", "root"},
    "cli": {"cli", "sweeps", "regression", "api", "request", "transforms", "passes", "runtime", "compiler", "root"},
}
ONLY_IN = {
    "onnx": {"runtime/onnx/export.py"},
    "onnxscript": {
        "runtime/onnx/doubles.py",
        "runtime/onnx/nearest.py",
        "runtime/onnx/translations.py",
        "runtime/onnx/optimize.py",
        "runtime/onnx/registry.py",
    },
    "onnx_ir": {
        "runtime/onnx/doubles.py",
        "runtime/onnx/export.py",
        "runtime/onnx/onnx_model.py",
        "runtime/onnx/optimize.py",
        "runtime/onnx/pads.py",
    },
    "onnxruntime": {"runtime/onnx/ort.py", "runtime/onnx/ort_cuda.py"},
    "openvino": {"runtime/onnx/openvino.py"},
    "pandas": {"runtime/report.py"},
    "graphviz": {"cli/graph.py"},
    "jinja2": {"runtime/page/document.py"},
    "cloudpickle": {"background/job.py"},
    "typer": {"cli/app.py", "cli/cache.py", "cli/main.py", "cli/options.py"},
    "rich": {"cli/console.py", "runtime/progress.py"},
}
# Imported before torch: by `import tsopt`, by `tsopt --help`, and by a bundle where torch is not installed.
WITHOUT_TORCH = (
    "__init__.py",
    "errors.py",
    "compiler/calls/snapshot.py",
    "compiler/calls/conditions.py",
    "compiler/calls/counters.py",
    "compiler/calls/effects.py",
    "compiler/calls/memory.py",
    "compiler/capture/question.py",
    "compiler/calls/signature.py",
    "compiler/calls/signature_json.py",
    "compiler/calls/structure.py",
    "compiler/calls/structure_json.py",
    "compiler/calls/tensor_file.py",
    "compiler/calls/types.py",
    "compiler/calls/result_views.py",
    "compiler/calls/example.py",
    "runtime/checking/verdict.py",
    "runtime/calling/ambient.py",
    "runtime/bundles/store.py",
    "runtime/thread_count.py",
    "runtime/telemetry.py",
    "compiler/forks.py",
    "runtime/backends/backend.py",
    "runtime/backends/table.py",
    "runtime/backends/candidate.py",
    "runtime/bundles/opening.py",
    "compiler/precision_names.py",
    "runtime/calling/executable.py",
    "runtime/calling/signature_guard.py",
    "runtime/calling/result_code.py",
    "compiler/graph/strict_json.py",
    "runtime/racing/cache_directory.py",
    "runtime/bundles/known_bundles.py",
    "runtime/bundles/members.py",
    "runtime/bundles/onnx_file.py",
    "runtime/bundles/onnx_wire.py",
    "runtime/bundles/probe.py",
    "runtime/sandbox/processes.py",
    "runtime/bundles/staging.py",
    "runtime/locked_directory.py",
    "runtime/calling/value_checks.py",
    "runtime/racing/cache_files.py",
    "runtime/racing/outcomes.py",
    "runtime/racing/environment.py",
    "runtime/untrusted_text.py",
    "runtime/stages.py",
    "runtime/progress.py",
    "runtime/onnx/onnx_model.py",
    "runtime/onnx/ort.py",
    "runtime/onnx/openvino.py",
    "runtime/onnx/openvino_quotients.py",
    "runtime/onnx/int8_weights.py",
    "cli/app.py",
    "cli/main.py",
    "cli/console.py",
    "cli/doctor.py",
    "cli/export.py",
    "cli/hub_kernels.py",
    "cli/library_models.py",
    "cli/model_file.py",
    "cli/model_sources.py",
    "cli/options.py",
    "cli/outputs.py",
    "cli/process.py",
    "cli/profile.py",
    "cli/bench.py",
    "cli/cache.py",
    "cli/check.py",
    "cli/graph.py",
    "pytest_plugin.py",
    "cli/quantize.py",
    "cli/saved.py",
    "runtime/layer_table.py",
    "cli/verify.py",
)


def layer_of(module: str) -> str:
    part = [*module.split("."), ""][1]
    return part if part in MAY else "root"


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno


def at_import(tree: ast.Module) -> Iterator[str]:
    """Modules imported when the file is, not inside a function and not for the type checker alone."""
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (name for name, _ in imports(node))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_go_one_way():
    wrong = []
    for path in FILES:
        if path.name in ("__init__.py", "__main__.py") and path.parent == ROOT:
            continue  # the public surface names every layer
        allowed = MAY[layer_of("tsopt." + ".".join(path.relative_to(ROOT).with_suffix("").parts))]
        wrong += [
            f"{name_of(path)}:{line}: {module}"
            for module, line in imports(ast.parse(path.read_text()))
            if module.split(".")[0] == "tsopt" and layer_of(module) not in allowed
        ]
    assert wrong == []


def test_heavy_libraries_live_in_one_file():
    wrong = []
    for path in FILES:
        found = {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()))}
        wrong += [(name_of(path), name) for name in ONLY_IN if name in found and name_of(path) not in ONLY_IN[name]]
    assert wrong == []


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_must_run_without_torch_does_not_import_it(name):
    modules = {module.split(".")[0] for module in at_import(ast.parse((ROOT / name).read_text()))}
    assert not modules & {"torch", "numpy", "safetensors", "onnx", "onnxruntime"}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_must_run_without_torch_imports_only_its_like(name):
    for module in at_import(ast.parse((ROOT / name).read_text())):
        place = module.replace(".", "/").removeprefix("tsopt/") + ".py"
        if module.startswith("tsopt.") and (ROOT / place).is_file():
            assert place in (*WITHOUT_TORCH, "_version.py"), f"{name} imports {module}"


def test_the_library_prints_nothing_and_sets_up_no_logger():
    forbidden = {"print", "logging.basicConfig", "log.addHandler", "log.setLevel", "eval", "torch.load", "os.system"}
    wrong = []
    for path in FILES:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        found = names & forbidden
        # The code that these run contains only numbers, and names that they have chosen themselves.
        found |= names & {"exec"} if path.name not in ("signature_guard.py", "result_code.py") else set()
        # Each node of what it evaluates is arithmetic or a comparison.
        found -= {"eval"} if name_of(path) == "compiler/calls/conditions.py" else set()
        # `background` unpickles only what its own process wrote, in a directory that only its user can enter.
        found |= {name for name in names if name.startswith("pickle.") and path.parent.name != "background"}
        wrong += [(name_of(path), name) for name in sorted(found)]
    assert wrong == []
