"""Reads what `simulate` and `plan` are given: manifests, and traces of load as CSV."""

import csv
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from slipway_api.crd import inference_service_crd
from slipway_api.inference_service import InferenceService
from slipway_cli.simulation import Load


class BadInputError(Exception):
    """A file that cannot be used; the message names the file, the place and what is wrong."""


def read_service(path: Path) -> InferenceService:
    """The only InferenceService of a manifest."""
    found = [one for one in read_documents(path) if one.get("kind") == InferenceService.KIND]
    if len(found) != 1:
        raise BadInputError(f"{path}: {len(found)} InferenceServices; one is needed")
    schema = spec_schema(inference_service_crd())
    if unknown := next(unknown_fields(found[0].get("spec"), schema, "spec"), None):
        raise BadInputError(f"{path}: unknown field {unknown}; see kubectl explain infsvc.spec --recursive")
    try:
        return InferenceService.parse(_with_namespace(found[0]))
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInputError(f"{path}: {where}: {first['msg']}") from exc


def read_documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a YAML file."""
    try:
        return [one for one in yaml.safe_load_all(path.read_text()) if isinstance(one, dict)]
    except (OSError, yaml.YAMLError) as exc:
        raise BadInputError(f"{path}: {exc}") from exc


def spec_schema(crd: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of the spec in a CustomResourceDefinition."""
    schema: Mapping[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def unknown_fields(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """The paths of fields that the schema does not have, such as `spec.runtime.maxModelLenn`."""
    if isinstance(value, list):
        for one in value:
            yield from unknown_fields(one, schema.get("items", {}), f"{path}[]")
    known = schema.get("properties")
    if not isinstance(value, dict) or known is None or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    for name, inner in value.items():
        if name in known:
            yield from unknown_fields(inner, known[name], f"{path}.{name}")
        else:
            yield f"{path}.{name}"


def read_trace(path: Path) -> list[Load]:
    """The rows of a CSV with the columns seconds, requests_per_second and, if wanted, prompt_tokens, output_tokens."""
    try:
        with path.open(newline="") as file:
            rows = list(_rows(path, csv.DictReader(file)))
    except OSError as exc:
        raise BadInputError(f"{path}: {exc}") from exc
    if not rows:
        raise BadInputError(f"{path}: no rows")
    if any(after.seconds <= before.seconds for before, after in pairwise(rows)):
        raise BadInputError(f"{path}: seconds must grow from row to row")
    return rows


def _rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[Load]:
    needed = {"seconds", "requests_per_second"}
    missing = needed - set(reader.fieldnames or ())
    if missing:
        raise BadInputError(f"{path}: no column {', '.join(sorted(missing))}")
    for row in reader:
        try:
            tokens = {name: int(row[name]) for name in ("prompt_tokens", "output_tokens") if row.get(name)}
            load = Load(seconds=float(row["seconds"]), requests_per_second=float(row["requests_per_second"]), **tokens)
        except ValueError as exc:
            raise BadInputError(f"{path}, line {reader.line_num}: {exc}") from exc
        if load.requests_per_second < 0 or load.prompt_tokens < 0 or load.output_tokens < 1:
            raise BadInputError(f"{path}, line {reader.line_num}: loads are not negative, and an answer has a token")
        yield load


def _with_namespace(document: dict[str, Any]) -> dict[str, Any]:
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        return document
    return document | {"metadata": {"namespace": "default"} | metadata}
